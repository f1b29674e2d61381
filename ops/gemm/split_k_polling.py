"""Split-K reduction by polling, for few sums: one program of a tile adds the others' as soon as they are written.

Its buffer holds EMPTY, a bit pattern that no sum has, wherever nothing is written. All programs that divide the inputs
of a tile write their sums into it, except the last one by number. That one reads until no number is EMPTY, sets all to
EMPTY again and adds them to its own. Between write and read there is neither a fence nor a counter, each of which takes
a further round trip to the L2 cache. Sums are added in a fixed order, so results do not depend on timing. Source: the
"Lamport" all-reduce of TensorRT-LLM and FlashInfer.

What this relies on: a GPU starts programs in the order of their numbers, as all of NVIDIA's have done, so those that
the last one waits for are running; launches with the same buffer follow one another; and sums are written after `wait`
(ops/common/launch.py), since the launch before may still be clearing the buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
"""As int32. Read as float32 it is a NaN, but not the one that arithmetic results in."""
ALL_BITS = tl.constexpr(2**32 - 1)
"""EMPTY as uint32, the largest number."""
OTHER_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _lane(SHAPE: tl.constexpr):
    """0, 1, ... in a shape [rows, columns]."""
    return tl.arange(0, SHAPE[0])[:, None] * SHAPE[1] + tl.arange(0, SHAPE[1])[None, :]


@triton.jit
def write_sums(total, buffer):
    """Write this program's sums. total: [rows, columns] float32. buffer: the tile's, [splits - 1, rows, columns] int32,
    indexed by program_id(1)."""
    bits = total.to(tl.int32, bitcast=True)
    size = total.shape[0] * total.shape[1]
    tl.store(buffer + tl.program_id(1) * size + _lane(total.shape), tl.where(bits == EMPTY, OTHER_NAN, bits))


@triton.jit
def _read(places, present):
    """The bits at `places` as they are now, 0 where not present; and whether one of the numbers is EMPTY."""
    bits = tl.load(places, mask=present, other=0, volatile=True)
    return bits, tl.max(bits.to(tl.uint32, bitcast=True)) == ALL_BITS


@triton.jit
def poll_sums(buffer, others, SHAPE: tl.constexpr, POLLED: tl.constexpr, ASM: tl.constexpr):
    """Wait for the sums of the other programs of a tile, and add them up: [rows, columns] float32.

    others: number of these programs, at most POLLED, a power of two. SHAPE: of the sums. buffer: as of `write_sums`.
    ASM: PTX may be used.
    """
    number = tl.arange(0, POLLED)[:, None, None]
    places = buffer + number * (SHAPE[0] * SHAPE[1]) + _lane(SHAPE)[None, :, :]
    present = tl.broadcast_to(number < others, places.shape)
    bits, is_missing = _read(places, present)
    while is_missing:
        if ASM:  # other programs need the memory's bandwidth
            tl.inline_asm_elementwise(
                "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        bits, is_missing = _read(places, present)
    tl.store(places, tl.full(bits.shape, EMPTY, tl.int32), mask=present)
    return tl.sum(bits.to(tl.float32, bitcast=True), axis=0)
