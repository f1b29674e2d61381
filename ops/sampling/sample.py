"""Drawing tokens on a GPU: temperature, top_k, top_p, min_p and the draw, without a sort and without a wait.

The arithmetic is that of `core/sampling/ops.py`; six kernels, each over all rows:

1. summarize: the peak of each chunk of the vocabulary, where it is, and the chunk's mass (sum of exponentials).
2. bracket: the row's peak and mass; for top_k and top_p, two bounds between which the cutoff lies almost surely, from a
   sample of the row at fixed places.
3. split: count and mass of what lies above the bounds; what lies between them is gathered.
4. search: the cutoff, by bisection among the gathered. Should it not be there, the whole row is gathered.
5. weigh: the mass of each chunk from the cutoff up.
6. draw: the chunk in which the cumulative distribution passes the uniform number, then the token in it.

A row that needs no cutoff leaves kernels 3 to 5 at once, and a greedy row needs only the peaks of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

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

if TYPE_CHECKING:
    from engine.core.sampling.table import SamplingTable

CHUNK = 4096
"""Tokens of the vocabulary for one program."""
SAMPLE = 1024
"""Logits of a row from which the bounds of its cutoff are guessed."""
_TILE = 4096
"""Gathered logits that the search reads at a time."""
_EPSILON = tl.constexpr(2.0**-52)


@triton.jit
def _uniform(key, position):
    """The uniform number of `sampling_ops.uniforms`: SplitMix64, scaled to float64 in [0, 1)."""
    x = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64).to(tl.float64) * 2.0**-53


@triton.jit
def _summarize_kernel(
    logits, stride, rows, temperatures, chunk_peaks, chunk_places, chunk_masses, vocab, chunks, CHUNK: tl.constexpr
):
    chunk, at = tl.program_id(0), tl.program_id(1)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + at.to(tl.int64) * stride + places, mask=places < vocab, other=-float("inf")).to(tl.float32)
    peak = value_of(tl.max(order_bits(x), axis=0))
    # No place equals NaN: the token is then wrong anyway, and need only lie within the vocabulary.
    first = tl.min(tl.where(x == peak, places, vocab - 1), axis=0)
    out = at * chunks + chunk
    tl.store(chunk_peaks + out, peak)
    tl.store(chunk_places + out, first)
    temperature = tl.load(temperatures + tl.load(rows + at))
    mass = 0.0
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        inverse = 1.0 / temperature
        mass = tl.sum(tl.exp((x - peak) * inverse), axis=0)
    tl.store(chunk_masses + out, mass)


@triton.jit
def _draw_kernel(
    logits,
    stride,
    rows,
    keys,
    outputs,
    temperatures,
    chunk_peaks,
    chunk_places,
    chunk_masses,
    peaks,
    states,
    tokens,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at = tl.program_id(0)
    peak = tl.load(peaks + at)
    numbers = tl.arange(0, CHUNKS)
    known = numbers < chunks
    own_peaks = tl.load(chunk_peaks + at * chunks + numbers, mask=known, other=-float("inf"))
    highest = tl.min(tl.where(own_peaks == peak, numbers, chunks - 1), axis=0)
    token = tl.load(chunk_places + at * chunks + highest)
    if tl.load(states + at * 4) > GREEDY:
        row = tl.load(rows + at)
        cut = tl.load(states + at * 4 + 3)
        masses = tl.load(chunk_masses + at * chunks + numbers, mask=known, other=0.0).to(tl.float64)
        passed = tl.cumsum(masses, axis=0)
        total = tl.max(passed, axis=0)
        # Strictly under the total, whatever the rounding: something with a share then lies above.
        point = tl.minimum(_uniform(tl.load(keys + row), tl.load(outputs + row)) * total, total - total * _EPSILON)
        chunk = tl.min(tl.where((passed > point) & (masses > 0), numbers, chunks - 1), axis=0)
        point -= tl.sum(tl.where(numbers < chunk, masses, 0.0), axis=0)

        places = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = places < vocab
        base = logits + at.to(tl.int64) * stride
        distances = distances_below(base, places, inside, peak, tl.load(temperatures + row))
        kept = distances.to(tl.int32, bitcast=True) <= cut
        shares = tl.where(kept, tl.exp(-distances), 0.0).to(tl.float64)
        passed = tl.cumsum(shares, axis=0)
        total = tl.max(passed, axis=0)
        point = tl.minimum(tl.maximum(point, 0.0), total - total * _EPSILON)
        found = tl.min(tl.where((passed > point) & (shares > 0), places, vocab), axis=0)
        # Only a chunk whose mass vanishes beside the peak's has no such token; its likeliest stands for it.
        token = tl.where(found < vocab, found, tl.load(chunk_places + at * chunks + chunk))
    tl.store(tokens + at, token.to(tl.int64))


def draw_rows(logits: torch.Tensor, rows: torch.Tensor, table: SamplingTable) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row: the first of the likeliest where the temperature is 0, else drawn.

    logits: [n, vocab] float32, bfloat16 or float16, left as they are; rows: [n] int64, where each row's parameters lie
    in the table, which is left as it is. Returns (tokens [n] int64, always within the vocabulary; peaks [n] float32,
    the greatest logit, NaN where any is NaN). A row's result depends on its logits and parameters only. Takes
    4 * n * vocab bytes of memory for as long as it runs.
    """
    n, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    peaks = torch.empty(n, dtype=torch.float32, device=device)
    if n == 0:
        return tokens, peaks
    assert logits.stride(1) == 1
    stride = logits.stride(0)
    chunks = triton.cdiv(vocab, CHUNK)
    most_chunks = triton.next_power_of_2(chunks)
    chunk_peaks, chunk_masses = torch.empty(2, n, chunks, dtype=torch.float32, device=device)
    chunk_places = torch.empty(n, chunks, dtype=torch.int32, device=device)
    states = torch.empty(n, 4, dtype=torch.int32, device=device)
    tallies = torch.empty(n, 3, dtype=torch.int64, device=device)
    gathered = torch.empty(n, vocab, dtype=torch.float32, device=device)
    temperature, top_k, top_p = table.temperature, table.top_k, table.top_p

    grid = (chunks, n)
    _summarize_kernel[grid](
        logits, stride, rows, temperature, chunk_peaks, chunk_places, chunk_masses, vocab, chunks, CHUNK, num_warps=8
    )
    bracket_kernel[(n,)](
        logits,
        stride,
        rows,
        temperature,
        top_k,
        top_p,
        table.min_score,
        chunk_peaks,
        chunk_masses,
        peaks,
        states,
        tallies,
        vocab,
        chunks,
        most_chunks,
        SAMPLE,
        num_warps=4,
    )
    split_kernel[grid](logits, stride, rows, temperature, peaks, states, tallies, gathered, vocab, CHUNK, num_warps=8)
    search_kernel[(n,)](
        logits,
        stride,
        rows,
        temperature,
        top_k,
        top_p,
        chunk_masses,
        peaks,
        states,
        tallies,
        gathered,
        vocab,
        chunks,
        most_chunks,
        _TILE,
        num_warps=16,
    )
    weigh_kernel[grid](
        logits, stride, rows, temperature, peaks, states, chunk_masses, vocab, chunks, CHUNK, num_warps=8
    )
    _draw_kernel[(n,)](
        logits,
        stride,
        rows,
        table.keys,
        table.outputs,
        temperature,
        chunk_peaks,
        chunk_places,
        chunk_masses,
        peaks,
        states,
        tokens,
        vocab,
        chunks,
        most_chunks,
        CHUNK,
        num_warps=8,
    )
    return tokens, peaks
