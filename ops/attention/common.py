"""Device functions that the attention kernels share: converting cached values, scaling and capping scores, sinks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_type(cached, DTYPE: tl.constexpr):
    """Convert cached keys or values to the type of the queries."""
    # Float8 goes through float32. The compiler would go through float16, and a GPU converts float16 to bfloat16 at an
    # eighth of the speed.
    if cached.dtype.is_fp8():
        cached = cached.to(tl.float32)
    return cached.to(DTYPE)


@triton.jit
def score_factor(scale, SOFTCAP: tl.constexpr):
    """Factor that turns a score into an exponent of 2: log2(e), times `scale` unless capped scores have it already."""
    factor = 1.4426950408889634
    if not SOFTCAP:
        factor = factor * scale
    return factor


@triton.jit
def capped(scores, softcap):
    """Compute softcap * tanh(scores / softcap) with exp2: tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0))


@triton.jit
def add_sinks(l_i, m_i, sinks_ptr, rows, NUM_ROWS: tl.constexpr):
    """Add the sinks of `rows` to their sums of weights l_i, relative to 2^m_i. Rows from NUM_ROWS on have no sink.

    Where a sink exceeds all scores by far the sum becomes infinite, and the result is zero, as it should be.
    """
    sinks = tl.load(sinks_ptr + rows, mask=rows < NUM_ROWS, other=float("-inf"))
    return l_i + tl.exp2(sinks * 1.4426950408889634 - m_i)
