"""Triton kernels of the built-in plugins, each beside the function that launches it.

This module imports nothing; the others import Triton, which is installed only where there is a GPU (or its interpreter
is wanted, which runs kernels on a CPU for their tests).
"""
