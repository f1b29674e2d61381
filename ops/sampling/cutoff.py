"""Kernels that find where top_k, top_p and min_p cut off a row of logits; `sample.py` lists them in order.

Scores are kept as distances below the row's max logit, (max_logit - logit) / temperature. Distances are at least 0, so
that their bits order as integers, and bisection over 31 bits ends at one value. Masses that decide a cutoff are summed
in fixed point: atomics gather a row in another order in each run, and a fixed-point sum does not depend on the order.
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
"""Fixed-point mass of the max logit: a sum over 2^23 tokens fits int64."""
_STEPS = tl.constexpr(22)
"""Steps of the bisection in the sample: leaves 9 of 31 bits open, which the bounds do not need."""
_DEVIATIONS = tl.constexpr(4.0)
"""Standard deviations between the estimate of the sample and each bound."""


@triton.jit
def order_bits(x):
    """Map float32 to int32 of the same order, NaN above all numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The inverse of `order_bits`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def distances_below(logits, columns, inside, max_logit, temperature):
    """Distances of the logits at `columns` below the max logit; infinite where not `inside`."""
    x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.div_rn(max_logit - x, temperature)


@triton.jit
def _fixed(distances):
    """Masses (exponentials) in fixed point."""
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
    chunk_max_logits,
    chunk_masses,
    max_logits,
    states,
    tallies,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Write the row's max logit, its state [4] (mode, near bound, far bound, cutoff: bits of distances) and zeroed
    tallies [3]; scale the masses of its chunks from each chunk's max logit to the row's."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    cut = tl.abs(tl.load(min_scores + row)).to(tl.int32, bitcast=True)

    numbers = tl.arange(0, CHUNKS)
    known = numbers < chunks
    own_max_logits = tl.load(chunk_max_logits + at * chunks + numbers, mask=known, other=-float("inf"))
    max_logit = value_of(tl.max(order_bits(own_max_logits), axis=0))
    tl.store(max_logits + at, max_logit)

    drawn = (temperature > 0) & (max_logit == max_logit) & (tl.abs(max_logit) < float("inf"))
    by_count = drawn & (top_k > 0) & (top_k < vocab)
    by_mass = drawn & (top_p < 1)
    mode = tl.where(by_count | by_mass, SEARCH, tl.where(cut < _INFINITE, CUT, DRAW))
    tl.store(states + at * 4, tl.where(drawn, mode, GREEDY))
    tl.store(states + at * 4 + 3, cut)
    total = 0.0
    if drawn:
        masses = tl.load(chunk_masses + at * chunks + numbers, mask=known, other=0.0)
        masses = masses * tl.exp(-tl.div_rn(max_logit - own_max_logits, temperature))
        tl.store(chunk_masses + at * chunks + numbers, masses, mask=known)
        total = tl.sum(masses, axis=0)

    if by_count | by_mass:
        tl.store(tallies + at * 3, 0)
        tl.store(tallies + at * 3 + 1, 0)
        tl.store(tallies + at * 3 + 2, 0)
        taken = tl.minimum(vocab, SAMPLE)
        drops = tl.arange(0, SAMPLE)
        columns = (drops.to(tl.int64) * vocab // taken).to(tl.int32)
        inside = drops < taken
        distances = distances_below(logits + at.to(tl.int64) * stride, columns, inside, max_logit, temperature)
        bits = tl.where(inside, distances.to(tl.int32, bitcast=True), _BEYOND)[None, :]
        each = vocab * 1.0 / taken
        # Two bisections in parallel: 0 for the near bound, 1 for the far bound.
        ends = tl.arange(0, 2)
        low = tl.full((2,), -1, tl.int32)
        high = tl.full((2,), _INFINITE, tl.int32)
        if by_count:
            expected = top_k.to(tl.float32) / each
            slack = _DEVIATIONS * (tl.sqrt(expected) + 1.0)
            limits = tl.where(ends == 0, expected - slack, expected + slack)
            for _ in range(_STEPS):
                middle = low + ((high - low) >> 1)
                within = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1)
                up = within.to(tl.float32) <= limits
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
                unsampled = tl.exp(-middle.to(tl.float32, bitcast=True))
                doubt = _DEVIATIONS * (tl.sqrt(variance) + unsampled)
                up = tl.where(ends == 0, tail - doubt, tail + doubt) > rest
                low = tl.where(up, middle, low)
                high = tl.where(up, high, middle)
        # top_p applies after top_k: its cutoff may be anywhere nearer than that of top_k.
        near = tl.where(by_count & by_mass, -1, tl.sum(tl.where(ends == 0, low, 0), axis=0))
        tl.store(states + at * 4 + 1, near)
        tl.store(states + at * 4 + 2, tl.sum(tl.where(ends == 1, high, 0), axis=0))


@triton.jit
def split_kernel(logits, stride, rows, temperatures, max_logits, states, tallies, gathered, vocab, CHUNK: tl.constexpr):
    """Gather the distances between the bounds, in any order. Tallies: number of gathered distances; number and
    fixed-point mass of the tokens up to the near bound."""
    chunk, at = tl.program_id(0), tl.program_id(1)
    if tl.load(states + at * 4) < SEARCH:
        return
    temperature = tl.load(temperatures + tl.load(rows + at))
    near, far = tl.load(states + at * 4 + 1), tl.load(states + at * 4 + 2)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocab
    distances = distances_below(
        logits + at.to(tl.int64) * stride, columns, inside, tl.load(max_logits + at), temperature
    )
    bits = distances.to(tl.int32, bitcast=True)
    above = bits <= near
    between = inside & (bits > near) & (bits <= far)
    taken = between.to(tl.int32)
    start = tl.atomic_add(tallies + at * 3, tl.sum(taken, axis=0).to(tl.int64))
    tl.atomic_add(tallies + at * 3 + 1, tl.sum(above.to(tl.int32), axis=0).to(tl.int64))
    tl.atomic_add(tallies + at * 3 + 2, tl.sum(tl.where(above, _fixed(distances), 0), axis=0))
    target = at.to(tl.int64) * vocab + start + tl.cumsum(taken, axis=0) - 1
    tl.store(gathered + target, distances, mask=between)


@triton.jit
def _count(gathered, number, bound, TILE: tl.constexpr):
    """Number of gathered distances up to the bound."""
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, number, TILE):
        at = start + tl.arange(0, TILE)
        distances = tl.load(gathered + at, mask=at < number, other=0.0)
        found += ((at < number) & (distances.to(tl.int32, bitcast=True) <= bound)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _mass(gathered, number, bound, TILE: tl.constexpr):
    """Fixed-point mass of the gathered distances up to the bound."""
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
    max_logits,
    states,
    tallies,
    gathered,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the cutoff: bits of the greatest distance that is kept."""
    at = tl.program_id(0)
    if tl.load(states + at * 4) < SEARCH:
        return
    row = tl.load(rows + at)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    by_count = (top_k > 0) & (top_k < vocab)
    by_mass = top_p < 1
    low, high = tl.load(states + at * 4 + 1), tl.load(states + at * 4 + 2)
    number = tl.load(tallies + at * 3).to(tl.int32)
    near_count = tl.load(tallies + at * 3 + 1).to(tl.int32)
    near_mass = tl.load(tallies + at * 3 + 2)
    gathered += at.to(tl.int64) * vocab

    numbers = tl.arange(0, CHUNKS)
    masses = tl.load(chunk_masses + at * chunks + numbers, mask=numbers < chunks, other=0.0)
    goal = top_p.to(tl.float64) * tl.sum(masses.to(tl.float64), axis=0) * _UNIT

    # Do the bounds enclose the cutoff? A far bound of infinity lies beyond every token.
    if by_count:
        enclosed = (near_count < top_k) & ((high == _INFINITE) | (near_count + number >= top_k))
    else:
        up_to_far = (near_mass + _mass(gathered, number, high, TILE)).to(tl.float64)
        enclosed = (near_mass.to(tl.float64) < goal) & ((high == _INFINITE) | (up_to_far >= goal))
    if enclosed == 0:
        max_logit, temperature = tl.load(max_logits + at), tl.load(temperatures + row)
        for start in range(0, vocab, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < vocab
            distances = distances_below(logits + at.to(tl.int64) * stride, columns, inside, max_logit, temperature)
            tl.store(gathered + columns, distances, mask=inside)
    tl.debug_barrier()  # other threads read what a thread has gathered
    low = tl.where(enclosed, low, -1)
    high = tl.where(enclosed, high, _INFINITE)
    number = tl.where(enclosed, number, vocab)
    near_count = tl.where(enclosed, near_count, 0)
    near_mass = tl.where(enclosed, near_mass, 0)

    floor = low
    if by_count:
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reached = near_count + _count(gathered, number, middle, TILE) >= top_k
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle)
        # Of the tokens that tie with the last, only as many as top_k leaves count towards the whole of top_p.
        ties = top_k - near_count - _count(gathered, number, high - 1, TILE)
        over = near_mass + _mass(gathered, number, high - 1, TILE)
        whole = over + ties.to(tl.int64) * _fixed(high.to(tl.float32, bitcast=True))
        goal = top_p.to(tl.float64) * whole.to(tl.float64)
    low = floor
    if by_mass:
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reached = (near_mass + _mass(gathered, number, middle, TILE)).to(tl.float64) >= goal
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle)
    tl.store(states + at * 4 + 3, tl.minimum(tl.load(states + at * 4 + 3), high))


@triton.jit
def weigh_kernel(
    logits, stride, rows, temperatures, max_logits, states, chunk_masses, vocab, chunks, CHUNK: tl.constexpr
):
    """Write the mass of each chunk up to the cutoff distance."""
    chunk, at = tl.program_id(0), tl.program_id(1)
    if tl.load(states + at * 4) < CUT:
        return
    temperature, cut = tl.load(temperatures + tl.load(rows + at)), tl.load(states + at * 4 + 3)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocab
    distances = distances_below(
        logits + at.to(tl.int64) * stride, columns, inside, tl.load(max_logits + at), temperature
    )
    masses = tl.where(distances.to(tl.int32, bitcast=True) <= cut, tl.exp(-distances), 0.0)
    tl.store(chunk_masses + at * chunks + chunk, tl.sum(masses, axis=0))
