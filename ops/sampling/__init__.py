"""Kernels of sampling, and the first and last kernel of a decode step replayed as a CUDA graph."""
