"""Opens the CUDA driver's library, of which torch offers only some functions. Imports neither torch nor Triton."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


def open_driver() -> ctypes.CDLL:
    """Open the library. Each call returns an object of its own, so that argument types which a caller sets on its
    functions do not affect other callers.

    Raises OSError where there is no CUDA driver. Access to a function that the driver is too old for raises
    AttributeError.
    """
    return ctypes.CDLL(LIBRARY)
