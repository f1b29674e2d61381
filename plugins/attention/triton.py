"""Attention by Triton kernels that read the paged cache in place: one for decode, one for prefill."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import DeviceInfo
from engine.core.extras import install_command
from engine.core.quant import FLOAT8, has_float8


@frozen
class PrefillPlan:
    """Tiles of the prefilling sequences, and the launch parameters of their kernel."""

    tiles: torch.Tensor
    config: Any
    """A PrefillConfig."""


@frozen
class TritonPlan:
    """Arguments that the kernels of all layers share."""

    num_decodes: int
    decode_launch: Any
    """A DecodeConfig and its DecodeWorkspace."""
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    prefill: PrefillPlan | None


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
        from engine.ops.attention.paged_prefill import can_persist

        self._spec = spec
        self._sinks: Sequence[torch.Tensor | None] = (None,) * spec.num_layers
        self._pool = pool
        self._group = spec.num_heads // spec.num_kv_heads
        keys = pool.keys[0]
        self._can_persist = can_persist(keys, getattr(torch, spec.dtype), self._group)
        self._shared_memory = _shared_memory(keys.device)
        self._decode_launches: list[tuple[float, Any]] = []  # (maximum number of sequences, launch)
        heads = spec.num_heads, spec.num_kv_heads
        for limit, config in decode_configs(spec.head_dim, keys.itemsize, self._shared_memory, heads):
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
            prefill=self._plan_prefill(batch) if batch.num_decodes < batch.num_sequences else None,
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
        if plan.prefill is not None:
            paged_prefill(
                q,
                keys,
                values,
                plan.block_tables,
                plan.prefill.tiles,
                out,
                scale=spec.scale * scales.key,
                softcap=spec.softcap,
                window=spec.sliding_windows[layer],
                value_scale=scales.value,
                sinks=self._sinks[layer],
                config=plan.prefill.config,
            )

    def _plan_prefill(self, batch: ForwardBatch) -> PrefillPlan:
        from engine.ops.attention.paged_prefill import prefill_config, prefill_tiles

        queries, first = batch.query_lens_host, batch.num_decodes
        itemsize = getattr(torch, self._spec.dtype).itemsize
        longest = int(queries[first:].max())
        config = prefill_config(
            longest,
            self._group,
            self._spec.head_dim,
            itemsize,
            self._shared_memory,
            persistent=self._can_persist,
        )
        tiles = prefill_tiles(queries, batch.context_lens_host, first, config.tokens(self._group))
        return PrefillPlan(_to_device(tiles, batch.tokens.device), config)


def _to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy to the device; on a GPU asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _shared_memory(device: torch.device) -> int:
    """Shared memory per multiprocessor, bytes; on a CPU, where the interpreter has no limit, the least of any GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 65536


def _dotted(device: DeviceInfo) -> str:
    return ".".join(map(str, device.capability or ()))
