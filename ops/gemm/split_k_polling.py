"""Split-K reduction by polling, for few sums: one program of a tile adds the others' as soon as they are written.

All programs that divide the inputs of a tile write their sums into a buffer (ops/common/polling.py), except the last
one by number, which waits for them and adds them to its own. Sums are added in a fixed order, so results do not depend
on timing.

What this relies on: a GPU starts programs in the order of their numbers, as all of NVIDIA's have done, so those that
the last one waits for are running; launches with the same buffer follow one another; and sums are written after `wait`
(ops/common/launch.py), since the launch before may still be clearing the buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.common.polling import message, receive


@triton.jit
def _lane(SHAPE: tl.constexpr):
    """0, 1, ... in a shape [rows, columns]."""
    return tl.arange(0, SHAPE[0])[:, None] * SHAPE[1] + tl.arange(0, SHAPE[1])[None, :]


@triton.jit
def write_sums(total, buffer):
    """Write this program's sums. total: [rows, columns] float32. buffer: the tile's, [splits - 1, rows, columns] int32,
    indexed by program_id(1)."""
    size = total.shape[0] * total.shape[1]
    tl.store(buffer + tl.program_id(1) * size + _lane(total.shape), message(total.to(tl.int32, bitcast=True)))


@triton.jit
def poll_sums(buffer, others, SHAPE: tl.constexpr, POLLED: tl.constexpr, ASM: tl.constexpr):
    """Wait for the sums of the other programs of a tile, and add them up: [rows, columns] float32.

    others: number of these programs, at most POLLED, a power of two. SHAPE: of the sums. buffer: as of `write_sums`.
    ASM: PTX may be used.
    """
    number = tl.arange(0, POLLED)[:, None, None]
    places = buffer + number * (SHAPE[0] * SHAPE[1]) + _lane(SHAPE)[None, :, :]
    present = tl.broadcast_to(number < others, places.shape)
    return tl.sum(receive(places, present, ASM).to(tl.float32, bitcast=True), axis=0)
