"""Attention on a CPU: a C kernel decodes over the paged cache in place, PyTorch computes prefill."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import DeviceInfo
from engine.core.errors import ExecutorError
from engine.plugins.attention.torch import Group, TorchAttention

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURE = (
    *(_POINTER, _INT),  # q, q_stride
    *(_POINTER, _POINTER),  # keys, values
    *(_POINTER, _INT),  # tables, table_stride
    *(_POINTER, _POINTER, _INT),  # starts, ends, sequences
    *(_INT, _INT, _INT, _INT),  # kv_heads, group, dim, block_size
    *(ctypes.c_float, ctypes.c_float, ctypes.c_int),  # scale, softcap, threads
    _POINTER,  # out
)


@functools.cache
def native_kernel() -> Any:
    """Load paged_decode of _paged.c; None if it was not built."""
    spec = importlib.util.find_spec("engine.ops.attention._paged")
    if spec is None or spec.origin is None:
        return None
    kernel = ctypes.CDLL(spec.origin).paged_decode
    kernel.argtypes, kernel.restype = _SIGNATURE, ctypes.c_int
    return kernel


@frozen
class NativePlan:
    """Arguments of the decode kernel, and TorchAttention's plan of the prefilling sequences."""

    num_decodes: int
    block_tables: npt.NDArray[np.int32]
    """[decodes, max_blocks]."""
    starts: Mapping[int | None, npt.NDArray[np.int64]]
    """Per sliding window, [decodes]: first position that a sequence sees."""
    ends: npt.NDArray[np.int64]
    """[decodes]: context lengths."""
    prefill: Mapping[int, Sequence[Group]]


class NativeAttention(AttentionBackend[None, NativePlan]):
    """Decodes without copying keys and values; leaves prefill to TorchAttention."""

    api = "2"

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.torch_name}; use another backend or --device cpu"
        if spec.dtype != "float32":
            return f"its kernel computes in float32, not in {spec.dtype}; use --dtype float32 or another backend"
        if spec.kv_dtype != "float32":
            return (
                f"its kernel reads keys and values in float32, not {spec.kv_dtype}; use --kv-dtype float32 or"
                " --attention torch"
            )
        if native_kernel() is None:
            return "its native part was not built; install again with a C compiler at hand, or use another backend"
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        self._spec = spec
        self._pool = pool
        self._prefill = TorchAttention(spec, pool, None)
        self._kernel = native_kernel()

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> NativePlan:
        count = batch.num_decodes
        ends = batch.context_lens_host[:count].astype(np.int64)
        starts = {
            window: np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
            for window in set(self._spec.sliding_windows)
        }
        return NativePlan(
            num_decodes=count,
            block_tables=np.ascontiguousarray(batch.block_tables_host[:count]),
            starts=starts,
            ends=ends,
            prefill=self._prefill.plan_prefill(batch),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: NativePlan) -> torch.Tensor:
        if not plan.num_decodes:
            return self._prefill.forward(layer, q, k, v, plan.prefill)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: NativePlan, out: torch.Tensor
    ) -> None:
        if plan.num_decodes:
            self._decode(layer, q, plan, out)
        self._prefill.forward_groups(layer, q, plan.prefill[layer], out)

    def _decode(self, layer: int, q: torch.Tensor, plan: NativePlan, out: torch.Tensor) -> None:
        """Compute the decoding sequences' rows of `out`."""
        spec = self._spec
        failed = self._kernel(
            q.data_ptr(),
            q.stride(0),
            self._pool.keys[layer].data_ptr(),
            self._pool.values[layer].data_ptr(),
            plan.block_tables.ctypes.data,
            plan.block_tables.shape[1],
            plan.starts[spec.sliding_windows[layer]].ctypes.data,
            plan.ends.ctypes.data,
            plan.num_decodes,
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            spec.scale,
            spec.softcap or 0.0,
            torch.get_num_threads(),
            out.data_ptr(),
        )
        if failed:
            raise ExecutorError("there is no memory left for attention scores; use a lower --max-len or --max-running")
