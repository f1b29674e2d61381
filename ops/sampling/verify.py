"""Verifies drafts on a GPU, by the rules of `core/sampling/verify.py`, and advances the sequences.

A slice is a sequence's last token and the drafts after it. `match_rows` compares drafts with the tokens sampled in
their places; `verify_rows` accepts drafts by their probabilities and draws the token that replaces a rejected one. Both
have one program per slice, which accepts, replaces, and advances the sequence's state on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.sampling.cutoff import GREEDY, distances_below
from engine.ops.sampling.sample import CHUNK, EPSILON, draw_at, mix_bits, uniform_number, weigh_rows

_ACCEPT = tl.constexpr(1)
"""The stream of random numbers `verify.ACCEPT`."""


@triton.jit
def _store_and_advance(at, row, count, token, counts, tokens, last_tokens, num_outputs):
    """Store a slice's results, and advance its sequence by the accepted drafts and the token after them."""
    tl.store(counts + at, count)
    tl.store(tokens + at, token)
    tl.store(last_tokens + row, token)
    tl.store(num_outputs + row, tl.load(num_outputs + row) + count + 1)


@triton.jit(do_not_specialize=["k"])
def _match_kernel(drafts, k, sampled, first, rows, counts, tokens, last_tokens, num_outputs):
    at = tl.program_id(0)
    start = tl.load(first + at)
    count = tl.zeros([], tl.int64)
    token = tl.load(sampled + start)
    for place in range(k):
        draft = tl.load(drafts + at * k + place)
        # Before the first mismatch, `token` is the one sampled in the place of this draft.
        matches = (count == place) & (draft == token)
        count += matches.to(tl.int64)
        token = tl.load(sampled + start + count)
    _store_and_advance(at, tl.load(rows + at), count, token, counts, tokens, last_tokens, num_outputs)


@triton.jit(do_not_specialize=["k"])
def _verify_kernel(
    logits,
    stride,
    first,
    drafts,
    k,
    draft_probs,
    rows,
    keys,
    temperatures,
    chunk_max_logits,
    chunk_tokens,
    chunk_masses,
    max_logits,
    states,
    counts,
    tokens,
    last_tokens,
    num_outputs,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    start = tl.load(first + at)
    key, position = tl.load(keys + row), tl.load(num_outputs + row)
    temperature = tl.load(temperatures + row)
    draws = temperature > 0
    safe_temperature = tl.where(draws, temperature, 1.0)
    numbers = tl.arange(0, CHUNKS)
    known = numbers < chunks
    accept_key = mix_bits(key.to(tl.uint64, bitcast=True) ^ _ACCEPT).to(tl.int64, bitcast=True)

    # Accept: the probability of one token in p takes the row's masses, and one logit.
    count = tl.zeros([], tl.int64)
    given = tl.zeros([], tl.int64)
    for place in range(k):
        draft = tl.load(drafts + at * k + place)
        is_draft = (draft >= 0) & (given == place)
        given += is_draft.to(tl.int64)
        draft = tl.maximum(draft, 0)
        source = start + tl.where(is_draft, place, 0)
        max_logit = tl.load(max_logits + source)
        if tl.load(states + source * 4) > GREEDY:
            masses = tl.load(chunk_masses + source * chunks + numbers, mask=known, other=0.0).to(tl.float64)
            x = tl.load(logits + source * stride + draft).to(tl.float32)
            distance = tl.div_rn(max_logit - x, safe_temperature)
            kept = distance.to(tl.int32, bitcast=True) <= tl.load(states + source * 4 + 3)
            p = tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64) / tl.sum(masses, axis=0)
        else:
            own_max_logits = tl.load(chunk_max_logits + source * chunks + numbers, mask=known, other=-float("inf"))
            highest = tl.min(tl.where(own_max_logits == max_logit, numbers, chunks - 1), axis=0)
            p = (tl.load(chunk_tokens + source * chunks + highest) == draft).to(tl.float64)
        q = tl.load(draft_probs + (at * k + place).to(tl.int64) * vocab + draft).to(tl.float64)
        accepted = is_draft & (count == place) & (uniform_number(accept_key, position + place) * q < p)
        count += accepted.to(tl.int64)

    # The token after the accepted drafts, as without drafts; where one was rejected, drawn from max(p - q, 0).
    source = start + count
    number = uniform_number(key, position + count)
    token = draw_at(
        source,
        number,
        logits,
        stride,
        safe_temperature,
        chunk_max_logits,
        chunk_tokens,
        chunk_masses,
        max_logits,
        states,
        vocab,
        chunks,
        CHUNKS,
        CHUNK,
    ).to(tl.int64)
    if (count < given) & (tl.load(states + source * 4) > GREEDY):
        max_logit, cut = tl.load(max_logits + source), tl.load(states + source * 4 + 3)
        masses = tl.load(chunk_masses + source * chunks + numbers, mask=known, other=0.0).to(tl.float64)
        scale = 1.0 / tl.sum(masses, axis=0)
        base = logits + source * stride
        probs = draft_probs + (at * k + count) * vocab
        total = tl.zeros([], tl.float64)
        for chunk in range(chunks):
            rest = _rest(base, probs, chunk, max_logit, safe_temperature, cut, scale, vocab, CHUNK)
            total += tl.sum(rest, axis=0)
        point = tl.minimum(number * total, total - total * EPSILON)
        passed = tl.zeros([], tl.float64)
        found = tl.zeros([], tl.int64) + vocab
        last = tl.zeros([], tl.int64) - 1
        for chunk in range(chunks):
            rest = _rest(base, probs, chunk, max_logit, safe_temperature, cut, scale, vocab, CHUNK)
            columns = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
            beyond = (passed + tl.cumsum(rest, axis=0) > point) & (rest > 0)
            found = tl.minimum(found, tl.min(tl.where(beyond, columns, vocab), axis=0))
            last = tl.maximum(last, tl.max(tl.where(rest > 0, columns, -1), axis=0))
            passed += tl.sum(rest, axis=0)
        # The sums of both loops may differ by rounding; and nothing is left where p and q are equal up to rounding.
        found = tl.where(found < vocab, found, last)
        token = tl.where(found >= 0, found, token)
    _store_and_advance(at, row, count, token, counts, tokens, last_tokens, num_outputs)


@triton.jit
def _rest(base, probs, chunk, max_logit, temperature, cut, scale, vocab, CHUNK: tl.constexpr):
    """max(p - q, 0) in one chunk of the vocabulary: float64."""
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocab
    distances = distances_below(base, columns, inside, max_logit, temperature)
    kept = distances.to(tl.int32, bitcast=True) <= cut
    p = tl.where(kept, tl.exp(-distances), 0.0).to(tl.float64) * scale
    q = tl.load(probs + columns, mask=inside, other=0.0).to(tl.float64)
    return tl.where(inside, tl.maximum(p - q, 0.0), 0.0)


def match_rows(
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    *,
    last_tokens: torch.Tensor,
    num_outputs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first drafts of each slice that are the tokens sampled in their places; advance the sequences.

    drafts: [slices, k] int64, -1 where a slice has fewer; sampled: [n] int64, the tokens sampled from the rows of the
    logits; first: [slices] int64, each slice's first row; rows: [slices] int64, no sequence twice: each sequence's
    place in last_tokens and num_outputs, [all rows] int64, which are advanced.

    Returns (number of accepted drafts, the token after them), both [slices] int64.
    """
    slices, k = drafts.shape
    # A tensor each: that they are aligned must not depend on their number, or there would be two kernels.
    counts, tokens = (torch.empty(slices, dtype=torch.int64, device=drafts.device) for _ in range(2))
    if slices:
        _match_kernel[(slices,)](
            drafts.contiguous(), k, sampled, first, rows, counts, tokens, last_tokens, num_outputs, num_warps=1
        )
    return counts, tokens


def verify_rows(
    logits: torch.Tensor,
    logits_rows: torch.Tensor,
    first: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    rows: torch.Tensor,
    *,
    last_tokens: torch.Tensor,
    keys: torch.Tensor,
    num_outputs: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept or replace drafts that were drawn from probabilities; advance the sequences.

    logits: [n, vocab], of all positions of all slices, left unchanged; logits_rows: [n] int64, for each row the place
    of its sequence in the parameters; first, drafts, rows and last_tokens as of `match_rows`; draft_probs: [slices, k,
    vocab] float32, what each draft was drawn from, normalized. The parameters are those of `draw_rows`; num_outputs is
    advanced.

    Returns (number of accepted drafts [slices] int64, the token after them [slices] int64, max logits [n] float32, NaN
    where any logit is NaN). Uses 4 * n * vocab bytes of temporary memory.
    """
    slices, k = drafts.shape
    vocab = logits.shape[1]
    counts, tokens = torch.empty(2, slices, dtype=torch.int64, device=logits.device)
    weighed = weigh_rows(logits, logits_rows, temperature=temperature, top_k=top_k, top_p=top_p, log_min_p=log_min_p)
    if slices:
        chunks = weighed.chunk_masses.shape[1]
        _verify_kernel[(slices,)](
            logits,
            logits.stride(0),
            first,
            drafts.contiguous(),
            k,
            draft_probs.contiguous(),
            rows,
            keys,
            temperature,
            weighed.chunk_max_logits,
            weighed.chunk_tokens,
            weighed.chunk_masses,
            weighed.max_logits,
            weighed.states,
            counts,
            tokens,
            last_tokens,
            num_outputs,
            vocab,
            chunks,
            triton.next_power_of_2(chunks),
            CHUNK,
            num_warps=8,
        )
    return counts, tokens, weighed.max_logits
