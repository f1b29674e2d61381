"""The Triton backend over a latent cache (MLA): what it refuses, and its two kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.core.transfer import to_device
from engine.plugins.attention.triton_prefill import shared_memory

MAX_LATENT = 512
"""Maximum numbers of a latent: the acc of 64 rows then takes half of the registers of a program."""
MAX_ROTATED = 128


def latent_refusal(spec: AttentionSpec) -> str | None:
    """Return why the kernels cannot serve a latent cache; None if they can."""
    rotated = spec.head_dim - spec.output_dim
    if spec.num_kv_heads != 1:
        return f"it reads a latent cache of one KV head, not {spec.num_kv_heads}; use another backend"
    if any(spec.sliding_windows) or spec.softcap is not None or any(spec.sinks):
        return "it computes no sliding window, soft cap or attention sink over a latent cache; use another backend"
    if spec.output_dim > MAX_LATENT or rotated > MAX_ROTATED:
        return (
            f"it reads latents of up to {MAX_LATENT} numbers, followed by up to {MAX_ROTATED} others, not "
            f"{spec.output_dim} and {rotated}; use another backend"
        )
    return None


@frozen
class LatentPlan:
    """Arguments that the kernels of all layers share."""

    num_decodes: int
    decode_launch: Any
    """A LatentDecodeConfig and its LatentWorkspace."""
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    tiles: torch.Tensor | None
    """[tiles, 4] int32 of the prefilling sequences, from `prefill_tiles`; None: there are none."""


class LatentKernels:
    """Plans and launches attention over the latent cache of one cache group."""

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        from engine.ops.attention.latent_decode import latent_decode_configs
        from engine.ops.attention.latent_loads import padded_key
        from engine.ops.attention.latent_prefill import heads_per_tile, latent_prefill_config
        from engine.ops.common.launch import has_wgmma

        keys = pool.keys[0]
        key_bytes = sum(padded_key(spec.output_dim, spec.head_dim - spec.output_dim)) * keys.itemsize
        sizes = key_bytes, keys.itemsize, shared_memory(keys.device)
        self._scale = spec.scale
        self._keys = pool.keys
        self._decode_launches: list[tuple[float, Any]] = []  # (maximum number of sequences, launch)
        for limit, config in latent_decode_configs(spec.num_heads, *sizes):
            workspace = config.make_workspace(spec.num_heads, spec.output_dim, keys.device)
            self._decode_launches.append((limit, (config, workspace)))
        self._prefill_config: Any = latent_prefill_config(*sizes, wgmma=has_wgmma(keys.device))
        self._tokens_per_tile: int = self._prefill_config.tokens(heads_per_tile(spec.num_heads, self._prefill_config))

    def plan(self, batch: ForwardBatch) -> LatentPlan:
        """Plan a batch; decodes need no plan, in a graph or not."""
        return LatentPlan(
            num_decodes=batch.num_decodes,
            decode_launch=next(launch for limit, launch in self._decode_launches if batch.num_decodes <= limit),
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            tiles=self._tiles(batch) if batch.num_decodes < batch.num_sequences else None,
        )

    def _tiles(self, batch: ForwardBatch) -> torch.Tensor:
        """The tiles of the prefilling sequences."""
        from engine.ops.attention.paged_prefill import prefill_tiles

        sequences = np.arange(batch.num_decodes, batch.num_sequences)
        tiles = prefill_tiles(batch.query_lens_host, batch.context_lens_host, sequences, self._tokens_per_tile)
        [sent] = to_device([tiles], batch.tokens.device)
        return sent

    def attend(self, layer: int, q: torch.Tensor, plan: LatentPlan, out: torch.Tensor) -> None:
        """Compute one layer. q: [tokens, heads, head_dim]; out: [tokens, heads, size of a latent]."""
        from engine.ops.attention.latent_decode import latent_decode
        from engine.ops.attention.latent_prefill import latent_prefill

        cache = self._keys[layer]
        if plan.num_decodes:
            config, workspace = plan.decode_launch
            latent_decode(
                q,
                cache,
                plan.block_tables,
                plan.context_lens,
                out,
                num_sequences=plan.num_decodes,
                scale=self._scale,
                workspace=workspace,
                config=config,
            )
        if plan.tiles is not None:
            latent_prefill(q, cache, plan.block_tables, plan.tiles, out, scale=self._scale, config=self._prefill_config)
