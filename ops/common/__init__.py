"""Shared by all kernels: launches, and instructions that Triton does not expose."""
