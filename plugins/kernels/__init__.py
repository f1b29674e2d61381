"""Triton kernels of the built-in plugins, each beside the function that launches it.

This module imports nothing heavy; the others import Triton, which is installed only where there is a GPU (or its
interpreter is wanted).
"""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors in the CPU's memory.

    Triton reads the variable when a kernel is defined. The interpreter is for tests, and far too slow to serve.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
