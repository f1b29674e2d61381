"""Attention by Triton kernels that read the paged cache in place: one for decodes, one for stretches of prompts."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from attrs import frozen

from engine.core.attention import AttentionBackend, AttentionSpec, GraphSlot
from engine.core.batch import ForwardBatch
from engine.core.device import DeviceInfo
from engine.core.kv_cache import KVPool
from engine.core.kv_scales import FLOAT8


@frozen
class Prompts:
    """The tiles of the sequences with a stretch of prompt; `config` is a PrefillConfig."""

    tiles: torch.Tensor
    config: Any


@frozen
class Plan:
    """What a step's layers share; `launch` is how its decodes are launched: a DecodeConfig and its DecodeWorkspace."""

    decodes: int
    launch: Any
    tables: torch.Tensor
    lengths: torch.Tensor
    prompts: Prompts | None


class TritonAttention(AttentionBackend):
    """Paged, grouped-query, causal attention with optional sliding window and soft cap."""

    api = "1"
    reads_float8 = True
    graphs = "decode"

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """CPUs, GPUs too old for Triton, and sizes and types that the kernels cannot load."""
        if device.type != "cuda":
            return f"its kernels run on a GPU, not on {device.torch_name}; use another backend or --device cuda"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install 'pluggable-llm-engine[triton]', or use another backend"
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
        if spec.kv_dtype == FLOAT8 and device.capability is not None and device.capability < (8, 9):
            return (
                f"{FLOAT8} needs compute capability 8.9, and {device.torch_name} has {_dotted(device)}; "
                "use --kv-dtype auto"
            )
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        from engine.plugins.kernels.paged_decode import DecodeWorkspace, decode_configs
        from engine.plugins.kernels.paged_prefill import can_persist

        self._spec = spec
        self._pool = pool
        self._group = spec.num_heads // spec.num_kv_heads
        keys = pool.keys[0]
        self._can_persist = can_persist(keys, getattr(torch, spec.dtype), self._group)
        self._shared_memory = _shared_memory(keys.device)
        self._launches: list[tuple[float, Any]] = []  # up to so many sequences
        heads = spec.num_heads, spec.num_kv_heads
        for most, config in decode_configs(spec.head_dim, keys.itemsize, self._shared_memory, heads):
            programs = config.programs_a_head(spec.num_kv_heads, keys.device)
            workspace = DecodeWorkspace.make(programs, spec.num_heads, spec.num_kv_heads, spec.head_dim, keys.device)
            self._launches.append((most, (config, workspace)))

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Plan:
        """See AttentionBackend. Decodes need nothing, in a graph or not: the device reads lengths and tables."""
        return Plan(
            decodes=batch.num_decodes,
            launch=next(launch for most, launch in self._launches if batch.num_decodes <= most),
            tables=batch.block_tables,
            lengths=batch.context_lens,
            prompts=self._plan_prompts(batch) if batch.num_decodes < batch.num_sequences else None,
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        """See AttentionBackend."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, out: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        from engine.plugins.kernels.paged_decode import paged_decode
        from engine.plugins.kernels.paged_prefill import paged_prefill

        spec = self._spec
        keys, values, scales = self._pool.keys[layer], self._pool.values[layer], self._pool.scales[layer]
        if plan.decodes:
            config, workspace = plan.launch
            paged_decode(
                q,
                keys,
                values,
                plan.tables,
                plan.lengths,
                out,
                num_sequences=plan.decodes,
                scale=spec.scale * scales.key,
                softcap=spec.softcap,
                window=spec.sliding_windows[layer],
                value_scale=scales.value,
                workspace=workspace,
                config=config,
            )
        if plan.prompts is not None:
            paged_prefill(
                q,
                keys,
                values,
                plan.tables,
                plan.prompts.tiles,
                out,
                scale=spec.scale * scales.key,
                softcap=spec.softcap,
                window=spec.sliding_windows[layer],
                value_scale=scales.value,
                config=plan.prompts.config,
            )

    def _plan_prompts(self, batch: ForwardBatch) -> Prompts:
        from engine.plugins.kernels.paged_prefill import prefill_config, prefill_tiles

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
        return Prompts(_to_device(tiles, batch.tokens.device), config)


def _to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """One copy, which a GPU makes while the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _shared_memory(device: torch.device) -> int:
    """Bytes a multiprocessor; the interpreter has no limit, and gets the least that any GPU has."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 65536


def _dotted(device: DeviceInfo) -> str:
    return ".".join(map(str, device.capability or ()))
