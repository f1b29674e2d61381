"""Norms with fused residual addition, all-reduce or quantization."""
