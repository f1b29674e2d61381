"""All-reduce over GPUs, residual addition and norm in one kernel, which writes into the other GPUs' memory directly.

One program per row and rank. In one shot each rank sends its row to all others, which adds little latency but moves the
row to every rank. In two shots each rank sends its row to the rank that owns it, which adds up the rows and sends the
sum to all others: with more than two ranks fewer bytes, but twice the latency. Rows are messages without flags
(ops/common/polling.py). They are summed in float32, in one order on all ranks; in two shots the sum is rounded before
it is sent. So the results are the same on all ranks to the last bit, as benchmarks/all_reduce.py checks.

A row has two buffers, used in turn: a rank may still read one while another rank writes the other. `epochs` counts, for
each row, the calls that had this row. By the time that a buffer is written again, all ranks have read it: the writer
has received messages of the call in between, which the others send after they have finished the call before.

A program waits for the other ranks' programs of the same row. These will run, since a GPU starts programs in the order
of their numbers, as all of NVIDIA's have done: the first row that is not finished is in progress on all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.common.polling import message, receive


@frozen(kw_only=True, eq=False)
class ReduceBuffers:
    """Memory of all ranks in which rows of one size and dtype are reduced."""

    rank: int
    ranks: int
    size: int
    """Numbers per row; a row's bytes are a multiple of 4."""
    max_rows: int
    one_shot_rows: int
    """Up to this many rows are reduced in one shot."""
    messages: torch.Tensor
    """[ranks] int64: address of each rank's messages, [2, max_rows, ranks, words per row] int32, initially EMPTY
    (ops/common/polling.py)."""
    epochs: torch.Tensor
    """[max_rows] int32, initially zero: calls of this rank that had the row."""


@triton.jit
def _unpack(words, dtype: tl.constexpr):
    """The float32 or 16-bit numbers in words, along the last dimension, as float32."""
    if dtype == tl.float32:
        numbers = words.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        low, high = words << 16, (words >> 16) << 16
        numbers = tl.interleave(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        numbers = tl.interleave(low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(tl.float32))
    return numbers


@triton.jit
def _pack(numbers, dtype: tl.constexpr):
    """The inverse of `_unpack`, of one dimension; rounds."""
    if dtype == tl.float32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        halves = numbers.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(halves.reshape(halves.shape[0] // 2, 2))
        words = low | (high << 16)
    return words


@triton.jit
def _messages_of(messages, rank):
    """Pointer to a rank's messages."""
    return tl.multiple_of(tl.load(messages + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _send_to_others(words, place, messages, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write `words` to the other ranks' messages at offsets `place`."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_messages_of(messages, peer) + place, words, mask=mask)


@triton.jit
def _all_reduce_norm_kernel(
    out,
    residual,
    x,
    weight,
    messages,
    epochs,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_WORD: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK: SIZE rounded up to a power of two. PADDED_RANKS: RANKS likewise. PER_WORD: numbers per 32-bit word."""
    dtype: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = SIZE // PER_WORD
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    word = tl.arange(0, BLOCK // PER_WORD)
    is_word = word < WORDS
    sender = tl.arange(0, PADDED_RANKS)[:, None]
    is_other = (sender < RANKS) & (sender != RANK) & is_word[None, :]
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    epoch = tl.load(epochs + row) + 1
    inbox = _messages_of(messages, RANK)
    # Offsets of rank 0's message in a rank's memory; those of the other ranks follow.
    first = ((epoch & 1).to(tl.int64) * MAX_ROWS + row) * (RANKS * WORDS) + word
    inboxes = inbox + first[None, :] + sender * WORDS
    ours = tl.load(x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * WORDS + word, mask=is_word, other=0)
    ours = message(ours)
    offset = row.to(tl.int64) * SIZE + column
    residual_row = tl.load(residual + offset, mask=mask & HAS_RESIDUAL, other=0.0).to(tl.float32)
    if TWO_SHOTS:
        owner = row % RANKS
        if owner == RANK:
            words = tl.where(sender == RANK, ours[None, :], receive(inboxes, is_other, False))
            summed = message(_pack(tl.sum(_unpack(words, dtype), axis=0), dtype))
            _send_to_others(summed, first + RANK * WORDS, messages, is_word, RANK, RANKS)
        else:
            tl.store(_messages_of(messages, owner) + first + RANK * WORDS, ours, mask=is_word)
            summed = receive(inbox + first + owner * WORDS, is_word, False)
        total = _unpack(summed, dtype)
    else:
        _send_to_others(ours, first + RANK * WORDS, messages, is_word, RANK, RANKS)
        words = tl.where(sender == RANK, ours[None, :], receive(inboxes, is_other, False))
        total = tl.sum(_unpack(words, dtype), axis=0)
    # The norm is of the rounded sum that is stored, so that this layer and the next see the same residual.
    kept = (total + residual_row).to(dtype)
    tl.store(residual + offset, kept, mask=mask)
    total = kept.to(tl.float32)
    mean = tl.sum(total * total, axis=0) / SIZE
    normed = total * tl.rsqrt(mean + eps) * scale
    tl.store(out + offset, normed.to(dtype), mask=mask)
    tl.store(epochs + row, epoch)  # all threads have read it: the sum of squares is a barrier


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, buffers: ReduceBuffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce x over the ranks and add `residual`; returns the norm of that sum and the sum itself.

    x, residual: [..., size] of the buffers' dtype, at most `buffers.max_rows` rows, the same number on all ranks;
    weight: [size]. x is aligned to 4 bytes. The sum overwrites `residual`; without one it is in new memory. It is
    rounded to x's dtype before it is normalized, and above `buffers.one_shot_rows` rows also before `residual` is
    added; all arithmetic is float32.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    size = buffers.size
    rows = x.numel() // size
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is None else residual.contiguous()
    if rows:
        block = triton.next_power_of_2(size)
        _all_reduce_norm_kernel[(rows,)](
            out,
            total,
            x,
            weight,
            buffers.messages,
            buffers.epochs,
            eps,
            RANK=buffers.rank,
            RANKS=buffers.ranks,
            PADDED_RANKS=triton.next_power_of_2(buffers.ranks),
            MAX_ROWS=buffers.max_rows,
            SIZE=size,
            BLOCK=block,
            PER_WORD=4 // x.element_size(),
            TWO_SHOTS=rows > buffers.one_shot_rows,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(block // 512, 1), 8),
            **dependent_launch(x.device),
        )
    return out, total
