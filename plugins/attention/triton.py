"""Attention by Triton kernels that read the paged cache in place: one for decode, one for prefill."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import DeviceInfo
from engine.core.extras import install_command
from engine.core.quant import FLOAT8, has_float8
from engine.plugins.attention.triton_prefill import PrefillPart, PrefillPlanner, shared_memory


@frozen
class TritonPlan:
    """Arguments that the kernels of all layers share."""

    num_decodes: int
    decode_launch: Any
    """A DecodeConfig and its DecodeWorkspace."""
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    prefill: tuple[PrefillPart, ...]


class TritonAttention(AttentionBackend[None, TritonPlan]):
    """Paged, grouped-query, causal attention with optional sliding window, soft cap and sinks."""

    api = "2"
    reads_float8 = True
    reads_sinks = True
    graphs = "decode"

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        if device.type != "cuda":
            return f"its kernels run on a GPU, not on {device.torch_name}; use another backend or --device cuda"
        if importlib.util.find_spec("triton") is None:
            return f"triton is not installed; use another backend, or install it with `{install_command('triton')}`"
        if device.capability is not None and device.capability < (8, 0):
            return (
                f"it needs compute capability 8.0, and {device.torch_name} has {_dotted(device)}; use another backend"
            )
        if spec.head_dim % 16 or not 16 <= spec.head_dim <= 256:
            return f"its heads have a multiple of 16 up to 256 numbers, not {spec.head_dim}; use another backend"
        if spec.kv_dtype not in (spec.dtype, FLOAT8):
            return (
                f"keys and values must have the type of the activations ({spec.dtype}) or {FLOAT8}, "
                f"not {spec.kv_dtype}; use --kv-dtype auto"
            )
        if spec.kv_dtype == FLOAT8 and device.capability is not None and not has_float8(device):
            return (
                f"{FLOAT8} needs compute capability 8.9, and {device.torch_name} has {_dotted(device)}; "
                "use --kv-dtype auto"
            )
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        from engine.ops.attention.paged_decode_config import decode_configs
        from engine.ops.attention.paged_decode_merge import DecodeWorkspace

        self._spec = spec
        self._sinks: Sequence[torch.Tensor | None] = (None,) * spec.num_layers
        self._pool = pool
        self._prefill = PrefillPlanner(spec, pool)
        keys = pool.keys[0]
        self._decode_launches: list[tuple[float, Any]] = []  # (maximum number of sequences, launch)
        heads = spec.num_heads, spec.num_kv_heads
        for limit, config in decode_configs(spec.head_dim, keys.itemsize, shared_memory(keys.device), heads):
            programs = config.programs_per_head(spec.num_kv_heads, keys.device)
            workspace = DecodeWorkspace.make(programs, spec.num_heads, spec.num_kv_heads, spec.head_dim, keys.device)
            self._decode_launches.append((limit, (config, workspace)))

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        self._sinks = sinks

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> TritonPlan:
        # Decode needs no plan, in a graph or not: its kernel reads lengths and block tables on the device.
        return TritonPlan(
            num_decodes=batch.num_decodes,
            decode_launch=next(launch for limit, launch in self._decode_launches if batch.num_decodes <= limit),
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            prefill=self._prefill.plan(batch) if batch.num_decodes < batch.num_sequences else (),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TritonPlan, out: torch.Tensor
    ) -> None:
        from engine.ops.attention.paged_decode import paged_decode
        from engine.ops.attention.paged_prefill import paged_prefill
        from engine.ops.attention.widen_blocks import widen_blocks

        spec = self._spec
        keys, values, scales = self._pool.keys[layer], self._pool.values[layer], self._pool.scales[layer]
        if plan.num_decodes:
            config, workspace = plan.decode_launch
            paged_decode(
                q,
                keys,
                values,
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
            )
        for part in plan.prefill:
            read = keys, values
            if part.widened is not None:
                read = widen_blocks(keys, values, part.widened, q.dtype)
            paged_prefill(
                q,
                *read,
                part.tables,
                part.tiles,
                out,
                scale=spec.scale * scales.key,
                softcap=spec.softcap,
                window=spec.sliding_windows[layer],
                value_scale=scales.value,
                sinks=self._sinks[layer],
                config=part.config,
            )


def _dotted(device: DeviceInfo) -> str:
    return ".".join(map(str, device.capability or ()))
