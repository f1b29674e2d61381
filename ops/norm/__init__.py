"""Norms, with the residual addition, the all-reduce or the quantization fused."""
