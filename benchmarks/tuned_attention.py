"""The Triton kernels of attention by given launch parameters, over the keys and values of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool

Decode = Callable[[int, torch.Tensor], torch.Tensor]
"""Layer, q -> out."""


class Contexts(Protocol):
    """A batch of sequences, and the cache that holds their keys and values."""

    spec: AttentionSpec
    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor
    """[tokens, heads, head_dim]."""


def tuned_decode(contexts: Contexts, config: Any, programs: int | None = None) -> Decode:
    """Decode attention by a DecodeConfig. programs: per (folded) KV head; None: those of the whole device.

    The result holds the workspace. A captured graph does not: keep the result as long as its calls are replayed.
    """
    from engine.ops.attention.paged_decode import paged_decode
    from engine.ops.attention.paged_decode_merge import DecodeWorkspace

    spec, pool, batch = contexts.spec, contexts.pool, contexts.batch
    device = contexts.q.device
    programs = programs or config.programs_per_head(spec.num_kv_heads, device)
    workspace = DecodeWorkspace.make(programs, spec.num_heads, spec.num_kv_heads, spec.head_dim, device)

    def decode(layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_decode(
            q,
            pool.keys[layer],
            pool.values[layer],
            batch.block_tables,
            batch.context_lens,
            out,
            num_sequences=batch.num_sequences,
            scale=spec.scale,
            softcap=None,
            window=None,
            workspace=workspace,
            config=config,
        )
        return out

    return decode


def tuned_prefill(contexts: Contexts, config: Any) -> Decode:
    """Prefill attention by a PrefillConfig."""
    from engine.ops.attention.paged_prefill import paged_prefill, prefill_tiles
    from engine.ops.attention.prefill_schedule import prefill_schedule
    from engine.ops.common.launch import num_sms

    spec, pool, batch = contexts.spec, contexts.pool, contexts.batch
    tokens = config.tokens(spec.num_heads // spec.num_kv_heads)
    sequences, block_n = np.arange(batch.num_sequences), config.block_n if config.persistent else None
    tiles = prefill_tiles(batch.query_lens_host, batch.context_lens_host, sequences, tokens, block_n)
    if config.across_tiles:
        tiles = prefill_schedule(tiles, spec.num_kv_heads, num_sms(contexts.q.device), config.block_n)
    sent = torch.tensor(tiles, device=contexts.q.device)

    def prefill(layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_prefill(
            q,
            pool.keys[layer],
            pool.values[layer],
            batch.block_tables,
            sent,
            out,
            scale=spec.scale,
            softcap=None,
            window=None,
            config=config,
        )
        return out

    return prefill
