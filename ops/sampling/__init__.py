"""Sampling, and the two ends of a decode step replayed as a CUDA graph."""
