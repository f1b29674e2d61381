"""Cases of the attention conformance suite, and dense attention as the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.core.quant import FLOAT8, KVScales

Lengths = tuple[tuple[int, int], ...]
"""Per sequence: number of cached tokens, number of new tokens."""

BATCHES: dict[str, Lengths] = {
    "prefill": ((0, 7), (0, 33), (0, 1)),
    "chunked prefill": ((16, 16), (5, 9), (40, 1)),
    "decode": ((1, 1), (15, 1), (16, 1), (70, 1)),
    "one token": ((0, 1),),
    "mixed": ((31, 1), (3, 1), (0, 20), (17, 6)),
}


@frozen
class Case:
    """One forward pass: the batch, the inputs per layer, and the expected outputs."""

    batch: ForwardBatch
    pool: KVPool
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    expected: Sequence[torch.Tensor]
    """Per layer: [tokens, heads, head_dim] float64."""
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


def unpack(spec: AttentionSpec, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of q, k and v; packed: [tokens, heads + 2 * kv_heads, head_dim]."""
    q, k, v = torch.split(packed, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    return q, k, v


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
    Returns [new, heads, head_dim] float64.
    """
    new, context = len(q), len(k)
    group = spec.num_heads // spec.num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    at = torch.arange(context)
    for head in range(spec.num_heads):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        for row in range(new):
            position = context - new + row
            scores = keys @ q[row, head].double() * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            seen = at <= position
            if window is not None:
                seen &= at > position - window
            scores = scores[seen]
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = scores.softmax(0)[: int(seen.sum())] @ values[seen]
    return out
