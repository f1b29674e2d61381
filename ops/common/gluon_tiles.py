"""Parts of tiles in registers, for Gluon kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(values):
    """Split the columns into a left and a right half."""
    HALF: gl.constexpr = values.shape[1] // 2
    return values.reshape((values.shape[0], 2, HALF)).permute((0, 2, 1)).split()
