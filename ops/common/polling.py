"""Messages between programs without flags: words not written yet have a bit pattern that no message has.

A buffer holds EMPTY wherever nothing is written. A program writes its numbers there; another one reads until no word is
EMPTY, and sets all words to EMPTY again. Between write and read there is neither a fence nor a counter, each of which
takes a further round trip to the memory. Source: the "Lamport" all-reduce of TensorRT-LLM and FlashInfer.

The caller ensures that the writer is running or will run, that the buffer is EMPTY at first, and that a place is not
written again before its reader has set it to EMPTY: by the end of a kernel, or by a second buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
"""A word as int32. Read as one float32 or two 16-bit numbers it is NaN, but not the NaN that arithmetic produces."""
ALL_BITS = tl.constexpr(2**32 - 1)
"""EMPTY as uint32, the largest number."""
OTHER_NAN = tl.constexpr(0x7FFF7FFF)
"""NaN, too, as float32 and as two 16-bit numbers."""


@triton.jit
def message(words):
    """The words to write, which are never EMPTY. words: int32, of float32 or of pairs of 16-bit numbers."""
    return tl.where(words == EMPTY, OTHER_NAN, words)


@triton.jit
def _read(pointers, mask):
    """The words at `pointers` as they are now, 0 where masked; and whether one of them is EMPTY."""
    words = tl.load(pointers, mask=mask, other=0, volatile=True)
    return words, tl.max(words.to(tl.uint32, bitcast=True)) == ALL_BITS


@triton.jit
def receive(pointers, mask, PAUSE: tl.constexpr):
    """Wait for the message at `pointers`, and make room for the next one. Returns its words, 0 where masked.

    PAUSE: whether to sleep a moment between reads, for the sake of other programs' reads. CUDA only.
    """
    words, is_missing = _read(pointers, mask)
    while is_missing:
        if PAUSE:
            tl.inline_asm_elementwise(
                "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        words, is_missing = _read(pointers, mask)
    tl.store(pointers, tl.full(words.shape, EMPTY, tl.int32), mask=mask)
    return words
