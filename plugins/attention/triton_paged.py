"""The Triton backend over keys and values per head: one kernel for decode, one for prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from engine.core.attention import AttentionSpec, ForwardBatch, HeadRotation, KVPool
from engine.plugins.attention.triton_prefill import Float8Part, PrefillPart, PrefillPlanner, shared_memory

if TYPE_CHECKING:
    from engine.ops.attention.paged_decode_rotation import NewTokens


@frozen
class PagedPlan:
    """Arguments that the kernels of all layers share."""

    num_decodes: int
    decode_launch: Any
    """A DecodeConfig and its DecodeWorkspace."""
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    prefill: tuple[PrefillPart | Float8Part, ...]
    slots: torch.Tensor | None
    """Slots of the new tokens, if all sequences decode and none sees what another writes; else None."""


class PagedKernels:
    """Plans and launches attention over the keys and values of one cache group."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, *, float8_prefill: bool = False) -> None:
        """float8_prefill: whether long prompts are computed in float8."""
        from engine.ops.attention.paged_decode_config import decode_configs
        from engine.ops.attention.paged_decode_merge import DecodeWorkspace

        self._spec = spec
        self._sinks: Sequence[torch.Tensor | None] = (None,) * spec.num_layers
        self._pool = pool
        self.prefill = PrefillPlanner(spec, pool, float8=float8_prefill)
        keys = pool.keys[0]
        self._decode_launches: list[tuple[float, Any]] = []  # (maximum number of sequences, launch)
        heads = spec.num_heads, spec.num_kv_heads
        for limit, config in decode_configs(spec.head_dim, keys.itemsize, shared_memory(keys.device), heads):
            programs = config.programs_per_head(spec.num_kv_heads, keys.device)
            workspace = DecodeWorkspace.make(programs, spec.num_heads, spec.num_kv_heads, spec.head_dim, keys.device)
            self._decode_launches.append((limit, (config, workspace)))

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        """Keep the attention sinks: see AttentionBackend.set_sinks."""
        self._sinks = sinks

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Plan a batch. Decode needs no plan, in a graph or not: its kernel reads lengths and block tables on the
        device."""
        return PagedPlan(
            num_decodes=batch.num_decodes,
            decode_launch=next(launch for limit, launch in self._decode_launches if batch.num_decodes <= limit),
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            prefill=self.prefill.plan(batch) if batch.num_decodes < batch.num_sequences else (),
            slots=(None if batch.rows_share_sequences or batch.num_decodes < batch.num_sequences else batch.slots),
        )

    def rotate_and_attend(
        self, layer: int, qkv: torch.Tensor, rotation: HeadRotation, plan: PagedPlan
    ) -> torch.Tensor | None:
        """Compute one layer from its projections: [tokens, heads, head_dim]. None: separate kernels are to do it.

        qkv, rotation: as in AttentionBackend.rotate_and_forward.
        """
        if plan.slots is None:
            return None
        from engine.ops.attention.paged_decode_rotation import NewTokens, rotates_within_decode

        spec = self._spec
        rotary_dim = None if rotation.cos is None else 2 * rotation.cos.shape[1]
        heads, kv_dtype = (spec.num_heads, spec.num_kv_heads), self._pool.keys[layer].dtype
        if not rotates_within_decode(plan.decode_launch[0], heads, spec.head_dim, rotary_dim, kv_dtype):
            return None
        new = NewTokens(
            slots=plan.slots,
            cos=rotation.cos,
            sin=rotation.sin,
            weight=rotation.norm_weight,
            eps=rotation.norm_eps,
            key_scale=self._pool.scales[layer].key,
            interleaved=rotation.interleaved,
        )
        out = torch.empty((len(qkv), spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        q = qkv.view(len(qkv), -1, spec.head_dim).narrow(1, 0, spec.num_heads)
        self._decode(layer, q, plan, out, new)
        return out

    def attend(self, layer: int, q: torch.Tensor, plan: PagedPlan, out: torch.Tensor) -> None:
        """Compute one layer. q, out: [tokens, heads, head_dim]."""
        if plan.num_decodes:
            self._decode(layer, q, plan, out)
        for part in plan.prefill:
            if isinstance(part, Float8Part):
                self._prefill_float8(layer, q, part, out)
            else:
                self._prefill(layer, q, part, out)

    def _decode(
        self, layer: int, q: torch.Tensor, plan: PagedPlan, out: torch.Tensor, new: NewTokens | None = None
    ) -> None:
        """Compute the decoding sequences. new: how their projections, which q is then a part of, are rotated."""
        from engine.ops.attention.paged_decode import paged_decode

        spec, scales = self._spec, self._pool.scales[layer]
        config, workspace = plan.decode_launch
        paged_decode(
            q,
            self._pool.keys[layer],
            self._pool.values[layer],
            plan.block_tables,
            plan.context_lens,
            out,
            num_sequences=plan.num_decodes,
            scale=spec.scale * scales.key,
            softcap=spec.softcap,
            window=spec.sliding_windows[layer],
            value_scale=scales.value,
            sinks=self._sinks[layer],
            workspace=workspace,
            config=config,
            new=new,
        )

    def _prefill(self, layer: int, q: torch.Tensor, part: PrefillPart, out: torch.Tensor) -> None:
        """Compute sequences in the type of the activations."""
        from engine.ops.attention.paged_prefill import paged_prefill
        from engine.ops.attention.widen_blocks import widen_blocks

        keys, values, scales = self._pool.keys[layer], self._pool.values[layer], self._pool.scales[layer]
        if part.widened is not None:
            keys, values = widen_blocks(keys, values, part.widened, q.dtype)
        paged_prefill(
            q,
            keys,
            values,
            part.tables,
            part.tiles,
            out,
            scale=self._spec.scale * scales.key,
            softcap=self._spec.softcap,
            window=self._spec.sliding_windows[layer],
            value_scale=scales.value,
            sinks=self._sinks[layer],
            order=part.order,
            consecutive=part.widened is not None,
            config=part.config,
        )

    def _prefill_float8(self, layer: int, q: torch.Tensor, part: Float8Part, out: torch.Tensor) -> None:
        """Compute sequences in float8."""
        from engine.ops.attention.float8_tiles import gather_tiles
        from engine.ops.attention.persistent_float8 import float8_prefill

        keys, values, scales = self._pool.keys[layer], self._pool.values[layer], self._pool.scales[layer]
        window = self._spec.sliding_windows[layer]
        float8_prefill(
            q,
            *gather_tiles(keys, values, part.blocks, part.spans, window),
            part.tiles,
            out,
            scale=self._spec.scale * scales.key,
            softcap=self._spec.softcap,
            window=window,
            value_scale=scales.value,
            sinks=self._sinks[layer],
        )
