"""Draws tokens on a GPU: temperature, top_k, top_p, min_p and the draw, without a sort and without waiting.

The results are those of `core/sampling/arithmetic.py`. Six kernels, each over all rows:

1. summarize: each vocabulary chunk's max logit, its token, and the chunk's mass (sum of exponentials).
2. bracket: the row's max logit and mass; for top_k and top_p, two bounds that almost surely enclose the cutoff, from a
   sample of the row at fixed positions.
3. split: count and mass of the logits above the bounds; the logits between the bounds are gathered.
4. search: the cutoff, by bisection among the gathered logits. If the cutoff is not there, the whole row is gathered.
5. weigh: the mass of each chunk from the cutoff up.
6. draw: the chunk in which the cumulative distribution passes the uniform number, then the token in the chunk.

A row that needs no cutoff leaves kernels 3 to 5 immediately; a greedy row needs only the max logits of the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.sampling.cutoff import (
    GREEDY,
    bracket_kernel,
    distances_below,
    order_bits,
    search_kernel,
    split_kernel,
    value_of,
    weigh_kernel,
)

CHUNK = 4096
"""Tokens of the vocabulary per program."""
SAMPLE = 1024
"""Logits of a row from which the bounds of its cutoff are estimated."""
_TILE = 4096
"""Gathered logits per iteration of the search."""
EPSILON = tl.constexpr(2.0**-52)


@triton.jit
def mix_bits(x):
    """`arithmetic.mix`, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_number(key, position):
    """The uniform number of `arithmetic.uniforms`: SplitMix64, scaled to float64 in [0, 1)."""
    x = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (mix_bits(x) >> 11).to(tl.int64).to(tl.float64) * 2.0**-53


@triton.jit
def _summarize_kernel(
    logits, stride, rows, temperatures, chunk_max_logits, chunk_tokens, chunk_masses, vocab, chunks, CHUNK: tl.constexpr
):
    chunk, at = tl.program_id(0), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + at.to(tl.int64) * stride + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    max_logit = value_of(tl.max(order_bits(x), axis=0))
    # No logit equals NaN: the token then only has to lie within the vocabulary, since the step fails.
    first = tl.min(tl.where(x == max_logit, columns, vocab - 1), axis=0)
    out = at * chunks + chunk
    tl.store(chunk_max_logits + out, max_logit)
    tl.store(chunk_tokens + out, first)
    temperature = tl.load(temperatures + tl.load(rows + at))
    mass = 0.0
    if (temperature > 0) & (tl.abs(max_logit) < float("inf")):
        inverse = 1.0 / temperature
        mass = tl.sum(tl.exp((x - max_logit) * inverse), axis=0)
    tl.store(chunk_masses + out, mass)


@triton.jit
def draw_at(
    at,
    number,
    logits,
    stride,
    temperature,
    chunk_max_logits,
    chunk_tokens,
    chunk_masses,
    max_logits,
    states,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of the row `at` of the logits: the most likely one, or the one drawn by the uniform `number`."""
    max_logit = tl.load(max_logits + at)
    numbers = tl.arange(0, CHUNKS)
    known = numbers < chunks
    own_max_logits = tl.load(chunk_max_logits + at * chunks + numbers, mask=known, other=-float("inf"))
    highest = tl.min(tl.where(own_max_logits == max_logit, numbers, chunks - 1), axis=0)
    token = tl.load(chunk_tokens + at * chunks + highest)
    if tl.load(states + at * 4) > GREEDY:
        cut = tl.load(states + at * 4 + 3)
        masses = tl.load(chunk_masses + at * chunks + numbers, mask=known, other=0.0).to(tl.float64)
        passed = tl.cumsum(masses, axis=0)
        total = tl.max(passed, axis=0)
        # Strictly below the total, whatever the rounding: a token with a mass above 0 then follows.
        point = tl.minimum(number * total, total - total * EPSILON)
        chunk = tl.min(tl.where((passed > point) & (masses > 0), numbers, chunks - 1), axis=0)
        point -= tl.sum(tl.where(numbers < chunk, masses, 0.0), axis=0)

        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < vocab
        base = logits + at.to(tl.int64) * stride
        distances = distances_below(base, columns, inside, max_logit, temperature)
        kept = distances.to(tl.int32, bitcast=True) <= cut
        shares = tl.where(kept, tl.exp(-distances), 0.0).to(tl.float64)
        passed = tl.cumsum(shares, axis=0)
        total = tl.max(passed, axis=0)
        point = tl.minimum(tl.maximum(point, 0.0), total - total * EPSILON)
        found = tl.min(tl.where((passed > point) & (shares > 0), columns, vocab), axis=0)
        # A chunk whose mass rounds to 0 next to the largest may have no such token: its most likely one is taken.
        token = tl.where(found < vocab, found, tl.load(chunk_tokens + at * chunks + chunk))
    return token


@triton.jit
def _draw_kernel(
    logits,
    stride,
    rows,
    keys,
    num_outputs,
    offsets,
    temperatures,
    chunk_max_logits,
    chunk_tokens,
    chunk_masses,
    max_logits,
    states,
    tokens,
    vocab,
    chunks,
    OFFSETS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    position = tl.load(num_outputs + row)
    if OFFSETS:
        position += tl.load(offsets + at)
    token = draw_at(
        at,
        uniform_number(tl.load(keys + row), position),
        logits,
        stride,
        tl.load(temperatures + row),
        chunk_max_logits,
        chunk_tokens,
        chunk_masses,
        max_logits,
        states,
        vocab,
        chunks,
        CHUNKS,
        CHUNK,
    )
    tl.store(tokens + at, token.to(tl.int64))


@frozen(kw_only=True)
class WeighedRows:
    """The results of kernels 1 to 5 for rows of logits."""

    max_logits: torch.Tensor
    """[n] float32, NaN where any logit is NaN."""
    states: torch.Tensor
    """[n, 4] int32, as `cutoff.bracket_kernel` and `cutoff.search_kernel` write them."""
    chunk_max_logits: torch.Tensor
    """[n, chunks] float32."""
    chunk_tokens: torch.Tensor
    """[n, chunks] int32: the first most likely token of each chunk."""
    chunk_masses: torch.Tensor
    """[n, chunks] float32: mass from the cutoff up, in units of that of the row's most likely token."""


def draw_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    keys: torch.Tensor,
    num_outputs: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row: the first of the most likely where the temperature is 0, else drawn.

    logits: [n, vocab] float32, bfloat16 or float16, left unchanged; rows: [n] int64, each row's place in the parameters
    that follow, which are left unchanged. keys: [all rows] int64, hashes of the seeds; num_outputs: [all rows] int64,
    output tokens before; temperature, top_p, log_min_p: [all rows] float32; top_k: [all rows] int32, 0 for all tokens.
    offsets: [n] int64, output tokens between num_outputs and each row, as of drafts; None: 0 for all.

    Returns (tokens [n] int64, always within the vocabulary; max logits [n] float32, NaN where any logit is NaN). A
    row's result depends on its logits and parameters only. Uses 4 * n * vocab bytes of temporary memory.
    """
    n, vocab = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    weighed = weigh_rows(logits, rows, temperature=temperature, top_k=top_k, top_p=top_p, log_min_p=log_min_p)
    if n:
        chunks = weighed.chunk_masses.shape[1]
        _draw_kernel[(n,)](
            logits,
            logits.stride(0),
            rows,
            keys,
            num_outputs,
            num_outputs if offsets is None else offsets,
            temperature,
            weighed.chunk_max_logits,
            weighed.chunk_tokens,
            weighed.chunk_masses,
            weighed.max_logits,
            weighed.states,
            tokens,
            vocab,
            chunks,
            offsets is not None,
            triton.next_power_of_2(chunks),
            CHUNK,
            num_warps=8,
        )
    return tokens, weighed.max_logits


def weigh_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> WeighedRows:
    """Find the cutoff of each row, and the mass of its chunks from the cutoff up; arguments as of `draw_rows`."""
    n, vocab = logits.shape
    device = logits.device
    max_logits = torch.empty(n, dtype=torch.float32, device=device)
    assert logits.stride(1) == 1
    stride = logits.stride(0)
    chunks = triton.cdiv(vocab, CHUNK)
    padded_chunks = triton.next_power_of_2(chunks)
    # A tensor each: that they are aligned must not depend on n, or there would be two kernels of each kind.
    chunk_max_logits, chunk_masses = (torch.empty(n, chunks, dtype=torch.float32, device=device) for _ in range(2))
    chunk_tokens = torch.empty(n, chunks, dtype=torch.int32, device=device)
    states = torch.empty(n, 4, dtype=torch.int32, device=device)
    weighed = WeighedRows(
        max_logits=max_logits,
        states=states,
        chunk_max_logits=chunk_max_logits,
        chunk_tokens=chunk_tokens,
        chunk_masses=chunk_masses,
    )
    if n == 0:
        return weighed
    tallies = torch.empty(n, 3, dtype=torch.int64, device=device)
    gathered = torch.empty(n, vocab, dtype=torch.float32, device=device)

    grid = (chunks, n)
    _summarize_kernel[grid](
        logits,
        stride,
        rows,
        temperature,
        chunk_max_logits,
        chunk_tokens,
        chunk_masses,
        vocab,
        chunks,
        CHUNK,
        num_warps=8,
    )
    bracket_kernel[(n,)](
        logits,
        stride,
        rows,
        temperature,
        top_k,
        top_p,
        log_min_p,
        chunk_max_logits,
        chunk_masses,
        max_logits,
        states,
        tallies,
        vocab,
        chunks,
        padded_chunks,
        SAMPLE,
        num_warps=4,
    )
    split_kernel[grid](
        logits, stride, rows, temperature, max_logits, states, tallies, gathered, vocab, CHUNK, num_warps=8
    )
    search_kernel[(n,)](
        logits,
        stride,
        rows,
        temperature,
        top_k,
        top_p,
        chunk_masses,
        max_logits,
        states,
        tallies,
        gathered,
        vocab,
        chunks,
        padded_chunks,
        _TILE,
        num_warps=16,
    )
    weigh_kernel[grid](
        logits, stride, rows, temperature, max_logits, states, chunk_masses, vocab, chunks, CHUNK, num_warps=8
    )
    return weighed
