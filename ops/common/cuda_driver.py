"""The CUDA driver's library, whose functions torch has only in part. Imports neither torch nor Triton."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


def open_driver() -> ctypes.CDLL:
    """The library, as an object of the caller's own: argument types that are set on its functions are set on no others.

    Raises OSError where there is no CUDA driver. A function that the driver is too old for raises AttributeError.
    """
    return ctypes.CDLL(LIBRARY)
