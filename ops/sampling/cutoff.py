"""Where top_k, top_p and min_p cut a row of logits off: the middle kernels of `sampling.py`, which says in what order.

Scores are kept as distances below the row's peak, (peak - logit) / temperature: at least 0, so that their bits order as
integers, and bisection over 31 bits ends at one value. Masses that decide a cutoff are summed in fixed point, so that
the order of the sum does not matter, which differs from run to run where rows are gathered by atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY = tl.constexpr(0)
DRAW = tl.constexpr(1)
CUT = tl.constexpr(2)
"""A draw with min_p only: the cutoff needs no search."""
SEARCH = tl.constexpr(3)
_INFINITE = tl.constexpr(0x7F800000)
"""Bits of an infinite distance."""
_BEYOND = tl.constexpr(0x7FFFFFFF)
_UNIT = tl.constexpr(2.0**40)
"""Fixed-point mass of the peak: sums of 2^23 tokens fit int64."""
_STEPS = tl.constexpr(22)
"""Of the bisection in the sample: leaves 9 of 31 bits, of which the bounds have no need."""
_DEVIATIONS = tl.constexpr(4.0)
"""By how many standard deviations the bounds lie outside what the sample says."""


@triton.jit
def order_bits(x):
    """float32 as int32 of the same order, NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The inverse of `order_bits`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def distances_below(logits, places, inside, peak, temperature):
    """How far below the peak the logits at `places` lie, infinitely far where not `inside`."""
    x = tl.load(logits + places, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.div_rn(peak - x, temperature)


@triton.jit
def _fixed(distances):
    """Masses in fixed point."""
    return (tl.exp(-distances) * _UNIT).to(tl.int64)


@triton.jit
def bracket_kernel(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_scores,
    chunk_peaks,
    chunk_masses,
    peaks,
    states,
    tallies,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Writes the row's peak, its state [4] (mode, likelier bound, unlikelier bound, cutoff: bits of distances) and
    zeroed tallies [3], and makes the masses of its chunks relative to its peak."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    cut = tl.abs(tl.load(min_scores + row)).to(tl.int32, bitcast=True)

    numbers = tl.arange(0, CHUNKS)
    known = numbers < chunks
    own_peaks = tl.load(chunk_peaks + at * chunks + numbers, mask=known, other=-float("inf"))
    peak = value_of(tl.max(order_bits(own_peaks), axis=0))
    tl.store(peaks + at, peak)

    drawn = (temperature > 0) & (peak == peak) & (tl.abs(peak) < float("inf"))
    by_count = drawn & (top_k > 0) & (top_k < vocab)
    by_mass = drawn & (top_p < 1)
    mode = tl.where(by_count | by_mass, SEARCH, tl.where(cut < _INFINITE, CUT, DRAW))
    tl.store(states + at * 4, tl.where(drawn, mode, GREEDY))
    tl.store(states + at * 4 + 3, cut)
    total = 0.0
    if drawn:
        masses = tl.load(chunk_masses + at * chunks + numbers, mask=known, other=0.0)
        masses = masses * tl.exp(-tl.div_rn(peak - own_peaks, temperature))
        tl.store(chunk_masses + at * chunks + numbers, masses, mask=known)
        total = tl.sum(masses, axis=0)

    if by_count | by_mass:
        tl.store(tallies + at * 3, 0)
        tl.store(tallies + at * 3 + 1, 0)
        tl.store(tallies + at * 3 + 2, 0)
        taken = tl.minimum(vocab, SAMPLE)
        drops = tl.arange(0, SAMPLE)
        places = (drops.to(tl.int64) * vocab // taken).to(tl.int32)
        inside = drops < taken
        distances = distances_below(logits + at.to(tl.int64) * stride, places, inside, peak, temperature)
        bits = tl.where(inside, distances.to(tl.int32, bitcast=True), _BEYOND)[None, :]
        each = vocab * 1.0 / taken
        # Two bisections at once: 0 for the likelier bound, 1 for the unlikelier one.
        ends = tl.arange(0, 2)
        low = tl.full((2,), -1, tl.int32)
        high = tl.full((2,), _INFINITE, tl.int32)
        if by_count:
            expected = top_k.to(tl.float32) / each
            slack = _DEVIATIONS * (tl.sqrt(expected) + 1.0)
            limits = tl.where(ends == 0, expected - slack, expected + slack)
            for _ in range(_STEPS):
                middle = low + ((high - low) >> 1)
                likelier = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1)
                up = likelier.to(tl.float32) <= limits
                low = tl.where(up, middle, low)
                high = tl.where(up, high, middle)
        else:
            masses = tl.exp(-distances)[None, :]
            squares = masses * masses
            rest = (1.0 - top_p) * total / each
            for _ in range(_STEPS):
                middle = low + ((high - low) >> 1)
                below = bits > middle[:, None]
                tail = tl.sum(tl.where(below, masses, 0.0), axis=1)
                variance = tl.sum(tl.where(below, squares, 0.0), axis=1)
                unseen = tl.exp(-middle.to(tl.float32, bitcast=True))
                doubt = _DEVIATIONS * (tl.sqrt(variance) + unseen)
                up = tl.where(ends == 0, tail - doubt, tail + doubt) > rest
                low = tl.where(up, middle, low)
                high = tl.where(up, high, middle)
        # top_p after top_k: its cutoff may lie anywhere above that of top_k.
        likeliest = tl.where(by_count & by_mass, -1, tl.sum(tl.where(ends == 0, low, 0), axis=0))
        tl.store(states + at * 4 + 1, likeliest)
        tl.store(states + at * 4 + 2, tl.sum(tl.where(ends == 1, high, 0), axis=0))


@triton.jit
def split_kernel(logits, stride, rows, temperatures, peaks, states, tallies, gathered, vocab, CHUNK: tl.constexpr):
    """Gathers the distances between the bounds, in any order, and tallies: how many these are; number and fixed-point
    mass of what is likelier than both."""
    chunk, at = tl.program_id(0), tl.program_id(1)
    if tl.load(states + at * 4) < SEARCH:
        return
    temperature = tl.load(temperatures + tl.load(rows + at))
    likelier, unlikelier = tl.load(states + at * 4 + 1), tl.load(states + at * 4 + 2)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = places < vocab
    distances = distances_below(logits + at.to(tl.int64) * stride, places, inside, tl.load(peaks + at), temperature)
    bits = distances.to(tl.int32, bitcast=True)
    above = bits <= likelier
    between = inside & (bits > likelier) & (bits <= unlikelier)
    taken = between.to(tl.int32)
    start = tl.atomic_add(tallies + at * 3, tl.sum(taken, axis=0).to(tl.int64))
    tl.atomic_add(tallies + at * 3 + 1, tl.sum(above.to(tl.int32), axis=0).to(tl.int64))
    tl.atomic_add(tallies + at * 3 + 2, tl.sum(tl.where(above, _fixed(distances), 0), axis=0))
    target = at.to(tl.int64) * vocab + start + tl.cumsum(taken, axis=0) - 1
    tl.store(gathered + target, distances, mask=between)


@triton.jit
def _count(gathered, number, bound, TILE: tl.constexpr):
    """How many of the gathered lie at or above the bound."""
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, number, TILE):
        at = start + tl.arange(0, TILE)
        distances = tl.load(gathered + at, mask=at < number, other=0.0)
        found += ((at < number) & (distances.to(tl.int32, bitcast=True) <= bound)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass(gathered, number, bound, TILE: tl.constexpr):
    """The fixed-point mass of the gathered at or above the bound."""
    found = tl.zeros((TILE,), tl.int64)
    for start in range(0, number, TILE):
        at = start + tl.arange(0, TILE)
        distances = tl.load(gathered + at, mask=at < number, other=0.0)
        hit = (at < number) & (distances.to(tl.int32, bitcast=True) <= bound)
        found += tl.where(hit, _fixed(distances), 0)
    return tl.sum(found, axis=0)


@triton.jit
def search_kernel(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    chunk_masses,
    peaks,
    states,
    tallies,
    gathered,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the cutoff: bits of the greatest distance that is kept."""
    at = tl.program_id(0)
    if tl.load(states + at * 4) < SEARCH:
        return
    row = tl.load(rows + at)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    by_count = (top_k > 0) & (top_k < vocab)
    by_mass = top_p < 1
    low, high = tl.load(states + at * 4 + 1), tl.load(states + at * 4 + 2)
    number = tl.load(tallies + at * 3).to(tl.int32)
    likelier_count = tl.load(tallies + at * 3 + 1).to(tl.int32)
    likelier_mass = tl.load(tallies + at * 3 + 2)
    gathered += at.to(tl.int64) * vocab

    numbers = tl.arange(0, CHUNKS)
    masses = tl.load(chunk_masses + at * chunks + numbers, mask=numbers < chunks, other=0.0)
    goal = top_p.to(tl.float64) * tl.sum(masses.to(tl.float64), axis=0) * _UNIT

    # Do the bounds hold? Without an unlikelier bound (infinity), whatever is sought is found by then.
    if by_count:
        held = (likelier_count < top_k) & ((high == _INFINITE) | (likelier_count + number >= top_k))
    else:
        most = (likelier_mass + _mass(gathered, number, high, TILE)).to(tl.float64)
        held = (likelier_mass.to(tl.float64) < goal) & ((high == _INFINITE) | (most >= goal))
    if held == 0:
        peak, temperature = tl.load(peaks + at), tl.load(temperatures + row)
        for start in range(0, vocab, TILE):
            places = start + tl.arange(0, TILE)
            inside = places < vocab
            distances = distances_below(logits + at.to(tl.int64) * stride, places, inside, peak, temperature)
            tl.store(gathered + places, distances, mask=inside)
    tl.debug_barrier()  # what one thread gathered, another reads
    low = tl.where(held, low, -1)
    high = tl.where(held, high, _INFINITE)
    number = tl.where(held, number, vocab)
    likelier_count = tl.where(held, likelier_count, 0)
    likelier_mass = tl.where(held, likelier_mass, 0)

    floor = low
    if by_count:
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reached = likelier_count + _count(gathered, number, middle, TILE) >= top_k
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle)
        # Of those that tie with the last, only as many as top_k leaves count towards top_p's whole.
        ties = top_k - likelier_count - _count(gathered, number, high - 1, TILE)
        over = likelier_mass + _mass(gathered, number, high - 1, TILE)
        whole = over + ties.to(tl.int64) * _fixed(high.to(tl.float32, bitcast=True))
        goal = top_p.to(tl.float64) * whole.to(tl.float64)
    low = floor
    if by_mass:
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reached = (likelier_mass + _mass(gathered, number, middle, TILE)).to(tl.float64) >= goal
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle)
    tl.store(states + at * 4 + 3, tl.minimum(tl.load(states + at * 4 + 3), high))


@triton.jit
def weigh_kernel(logits, stride, rows, temperatures, peaks, states, chunk_masses, vocab, chunks, CHUNK: tl.constexpr):
    """Writes the mass of each chunk from the cutoff up."""
    chunk, at = tl.program_id(0), tl.program_id(1)
    if tl.load(states + at * 4) < CUT:
        return
    temperature, cut = tl.load(temperatures + tl.load(rows + at)), tl.load(states + at * 4 + 3)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = places < vocab
    distances = distances_below(logits + at.to(tl.int64) * stride, places, inside, tl.load(peaks + at), temperature)
    masses = tl.where(distances.to(tl.int32, bitcast=True) <= cut, tl.exp(-distances), 0.0)
    tl.store(chunk_masses + at * chunks + chunk, tl.sum(masses, axis=0))
