"""Cases of the attention conformance suite, and dense attention as the reference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.core.quant import FLOAT8, KVScales

FLOAT8_NAN = 0x7F
"""Byte of a float8_e4m3fn NaN."""

Lengths = tuple[tuple[int, int], ...]
"""Per sequence: number of cached tokens, number of new tokens."""

BATCHES: dict[str, Lengths] = {
    "prefill": ((0, 7), (0, 33), (0, 1)),
    "chunked prefill": ((16, 16), (5, 9), (40, 1)),
    "decode": ((1, 1), (15, 1), (16, 1), (70, 1)),
    "one token": ((0, 1),),
    "mixed": ((31, 1), (3, 1), (0, 20), (17, 6)),
}
LONG_BATCHES: dict[str, Lengths] = {
    "decode": ((61, 1), (8, 1), (199, 1), (30, 1)),
    "chunked prefill": ((61, 40), (130, 9), (7, 20), (40, 1)),
}
"""Batches with blocks behind a small window."""


@frozen
class Case:
    """One forward pass: the batch, the inputs per layer, and the expected outputs."""

    batch: ForwardBatch
    pool: KVPool
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Per layer: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; v of a latent cache: output_dim."""
    expected: Sequence[torch.Tensor]
    """Per layer: [tokens, heads, output_dim] float64."""
    sinks: Sequence[torch.Tensor | None] = ()
    """Per layer: [heads] float32, or None; empty if no layer has sinks."""


def scales_of(spec: AttentionSpec) -> tuple[KVScales, ...]:
    """Return scales of a float8 cache for values of about 1, some of which are clamped; none for other caches."""
    if spec.kv_dtype != FLOAT8:
        return ()
    return tuple(KVScales(key=0.006 + 0.02 * layer, value=0.05 - 0.013 * layer) for layer in range(spec.num_layers))


def sinks_of(spec: AttentionSpec, device: str) -> tuple[torch.Tensor | None, ...]:
    """Return sinks of the layers that have them, from far below the scores to far above; empty if none has."""
    sinks = torch.linspace(-3.0, 6.0, spec.num_heads, device=device)
    return tuple(sinks + layer if has_sinks else None for layer, has_sinks in enumerate(spec.sinks))


def stored(pool: KVPool, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize the keys and values in `slots`: [slots, kv_heads, head_dim] float64 each."""
    scales = pool.scales[layer]
    k, v = (part[layer].double().flatten(0, 1)[slots].cpu() for part in (pool.keys, pool.values))
    return k * scales.key, v * scales.value


def invalidate(pool: KVPool, layer: int, slots: torch.Tensor | slice = slice(None)) -> None:
    """Fill slots of a layer, by default all, with NaN."""
    for part in (pool.keys[layer], pool.values[layer]):
        if pool.is_float8:
            part.view(torch.uint8).flatten(0, 1)[slots] = FLOAT8_NAN
        else:
            part.flatten(0, 1)[slots] = torch.nan


def invalidate_behind_windows(case: Case, spec: AttentionSpec) -> None:
    """Fill blocks that are wholly behind the sliding window of all queries of a sequence with NaN, in each layer."""
    batch, size = case.batch, spec.block_size
    firsts = batch.context_lens_host - batch.query_lens_host
    for layer, window in enumerate(spec.sliding_windows):
        for first, table in zip(firsts.tolist(), batch.block_tables_host, strict=True):
            at = np.arange(0 if window is None else max(first + 1 - window, 0) // size * size)
            hidden = torch.from_numpy(table[at // size].astype(np.int64) * size + at % size)
            invalidate(case.pool, layer, hidden.to(batch.tokens.device))


def pack(spec: AttentionSpec, layer: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Concatenate the heads of q, k and v, of which a latent cache has no v: [tokens, heads, head_dim]."""
    return torch.cat(layer[:2] if spec.latent else layer, 1)


def unpack(spec: AttentionSpec, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of q, k and v in the result of `pack`."""
    if spec.latent:
        q, k = torch.split(packed, [spec.num_heads, spec.num_kv_heads], 1)
        return q, k, k[..., : spec.output_dim]
    q, k, v = torch.split(packed, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    return q, k, v


def batch_of(
    lengths: Lengths, tables: npt.NDArray[np.int32], slots: Sequence[npt.NDArray[np.int64]], device: str
) -> ForwardBatch:
    """Make the batch of these sequences. tables: [sequences, blocks]; slots: of each sequence, [context]."""
    news = np.array([new for _, new in lengths], np.int32)
    contexts = np.array([cached + new for cached, new in lengths], np.int32)
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    positions = np.concatenate([np.arange(cached, cached + new) for cached, new in lengths])
    places = np.concatenate([row[cached:] for row, (cached, _) in zip(slots, lengths, strict=True)])
    decodes = 0
    while decodes < len(lengths) and lengths[decodes][0] > 0 and lengths[decodes][1] == 1:
        decodes += 1
    return ForwardBatch(
        tokens=torch.arange(1, len(positions) + 1, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(places, dtype=torch.int64, device=device),
        query_starts=torch.tensor(starts, device=device),
        context_lens=torch.tensor(contexts, device=device),
        block_tables=torch.tensor(tables, device=device),
        logit_rows=torch.tensor(starts[1:] - 1, dtype=torch.int64, device=device),
        num_decodes=decodes,
        query_lens_host=news,
        context_lens_host=contexts,
        block_tables_host=tables,
    )


def random_case(spec: AttentionSpec, lengths: Lengths, device: str, seed: int) -> Case:
    """Make a case of random keys, values and queries in blocks of random order; unused slots hold NaN.

    Expected outputs over a float8 cache are computed from its quantized values.
    """
    pick = random.Random(seed)
    draw = torch.Generator().manual_seed(seed)
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // spec.block_size) for context in contexts]
    blocks = list(range(sum(counts) + 2))
    pick.shuffle(blocks)
    unused = blocks.pop()
    tables = np.full((len(lengths), max(counts)), unused, np.int32)
    slots: list[np.ndarray[Any, Any]] = []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[row, :count] = [blocks.pop() for _ in range(count)]
        at = np.arange(context)
        slots.append(tables[row, at // spec.block_size].astype(np.int64) * spec.block_size + at % spec.block_size)
    pool = KVPool(spec, sum(counts) + 2, device, scales_of(spec))
    given = getattr(torch, spec.dtype if pool.is_float8 else spec.kv_dtype)
    inputs, expected = [], []
    sinks = sinks_of(spec, device)
    for layer in range(spec.num_layers):
        invalidate(pool, layer)
        queries, keys, values, outs = [], [], [], []
        for row, (cached, new) in enumerate(lengths):
            shape = (contexts[row], spec.num_kv_heads, spec.head_dim)
            k, v = (torch.randn(shape, generator=draw).to(given) for _ in range(2))
            if spec.latent:
                v = k[..., : spec.output_dim]
            q = torch.randn((new, spec.num_heads, spec.head_dim), generator=draw).to(getattr(torch, spec.dtype))
            places = torch.tensor(slots[row], device=device)
            pool.write(layer, k.to(device), v.to(device), places)
            queries.append(q)
            keys.append(k[cached:])
            values.append(v[cached:])
            if pool.is_float8:
                k, v = stored(pool, layer, places)
            layer_sinks = sinks[layer] if sinks else None
            outs.append(dense_attention(q, k, v, spec, spec.sliding_windows[layer], layer_sinks))
        dtype = getattr(torch, spec.dtype)
        inputs.append(tuple(torch.cat(parts).to(device, dtype) for parts in (queries, keys, values)))
        expected.append(torch.cat(outs))
    return Case(batch_of(lengths, tables, slots, device), pool, inputs, expected, sinks)  # type: ignore[arg-type]


def graph_batch(spec: AttentionSpec, pool: KVPool, rows: int) -> ForwardBatch:
    """Make the batch of a graph of `rows` decodes: fixed buffers of padding, host arrays of maximum length."""
    device, scratch = pool.keys[0].device, pool.scratch_block
    tables = np.full((rows, -(-spec.max_len // spec.block_size)), scratch, np.int32)
    return ForwardBatch(
        tokens=torch.arange(1, rows + 1, device=device),
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slots=torch.full((rows,), scratch * spec.block_size, dtype=torch.int64, device=device),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, device=device),
        logit_rows=torch.arange(rows, device=device),
        num_decodes=rows,
        query_lens_host=np.ones(rows, np.int32),
        context_lens_host=np.full(rows, spec.max_len, np.int32),
        block_tables_host=tables,
    )


@contextmanager
def unwritten(batch: ForwardBatch, call: str) -> Iterator[None]:
    """Assert that the backend's `call` in the `with` block does not write to the batch, which core uses again."""
    before = {name: _copied(value) for name, value in attrs.asdict(batch, recurse=False).items()}
    yield
    after = attrs.asdict(batch, recurse=False)
    written = [name for name, value in before.items() if not np.array_equal(_copied(after[name]), value)]
    assert not written, f"{call} writes to the batch: {', '.join(written)}; core uses it again, so copy what changes"


def _copied(value: Any) -> Any:
    """A copy of a field of a batch, tensors on the host."""
    return value.cpu().numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)


def only(case: Case, index: int, decodes: bool) -> Case:
    """Return the case of one sequence alone, over the same pool."""
    batch = case.batch
    start, end = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
    rows, one = slice(start, end), slice(index, index + 1)
    alone = attrs.evolve(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=batch.query_starts[index : index + 2] - start,
        context_lens=batch.context_lens[one],
        block_tables=batch.block_tables[one],
        logit_rows=batch.logit_rows[one] - start,
        num_decodes=int(decodes),
        query_lens_host=batch.query_lens_host[one],
        context_lens_host=batch.context_lens_host[one],
        block_tables_host=batch.block_tables_host[one],
    )
    inputs = [(q[rows], k[rows], v[rows]) for q, k, v in case.inputs]
    return Case(alone, case.pool, inputs, [out[rows] for out in case.expected], case.sinks)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of one sequence by its definition, as the reference.

    q: [new, heads, head_dim], the last tokens of the sequence; k, v: [context, kv_heads, head_dim]; sinks: [heads].
    Returns [new, heads, size of a value] float64.
    """
    new, context = len(q), len(k)
    group = spec.num_heads // spec.num_kv_heads
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    at = torch.arange(context)
    positions = torch.arange(context - new, context)[:, None]
    seen = at <= positions
    if window is not None:
        seen &= at > positions - window
    used = seen.any(0)  # the others may hold NaN, which a weight of 0 does not cancel
    seen = seen[:, used]
    for head in range(spec.num_heads):
        keys, values = k[used, head // group].double(), v[used, head // group].double()
        scores = q[:, head].double() @ keys.T * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].to(scores).expand(new, 1)), 1)
        out[:, head] = scores.softmax(1)[:, : len(keys)] @ values
    return out
