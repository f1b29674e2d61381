"""Triton kernels of the layers and the sampler, each beside the function that launches it.

Imported only where they are used, since Triton is installed only where there is a GPU (or its interpreter is wanted).
"""
