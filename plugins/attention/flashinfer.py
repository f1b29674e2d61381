"""Attention by FlashInfer's kernels, compiled for the model's shape when the engine starts.

Prefill: FlashAttention 3 on Hopper, FlashAttention 2 on other GPUs and over a float8 cache, planned once per step.
Decode: XQA, which needs no plan and reads lengths on the device, so that CUDA graphs can replay it; for models that XQA
does not support, the planned decode wrapper. Written for FlashInfer 0.6.14.

Over a float8 cache all kernels convert the quantized values to the type of the queries and compute in that type.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen

from engine.core.attention import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    GraphSlot,
    GraphSupport,
    KVPool,
    layers_by_window,
)
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError, PluginError
from engine.core.extras import install_command
from engine.plugins.attention.flashinfer_block_lists import PageLists, page_lists
from engine.plugins.attention.flashinfer_rules import (
    HEAD_DIMS,
    TENSOR_CORE_GROUP,
    FlashInferOptions,
    fa3_refusal,
    workspace_size,
    xqa_refusal,
)
from engine.plugins.attention.flashinfer_xqa import XqaDecode
from engine.plugins.attention.refusals import capability_refusal, float8_refusal, kv_dtype_refusal

_log = logging.getLogger(__name__)


def trial_batch(device: torch.device) -> ForwardBatch:
    """Make a batch of one decode and one prefill of a token each, both in block 0: enough to run every kernel."""
    ones = np.ones(2, np.int32)
    tables = np.zeros((2, 1), np.int32)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    return ForwardBatch(
        tokens=zeros,
        positions=zeros,
        slots=zeros,
        query_starts=torch.arange(3, dtype=torch.int32, device=device),
        context_lens=torch.ones(2, dtype=torch.int32, device=device),
        block_tables=torch.zeros(2, 1, dtype=torch.int32, device=device),
        logit_rows=zeros,
        num_decodes=1,
        query_lens_host=ones,
        context_lens_host=ones,
        block_tables_host=tables,
    )


class _WrapperPair:
    """Two wrappers of one kind, planned alternately.

    A wrapper's plan() fills pinned memory and queues its copy to the device. With one step in flight that copy may
    still be queued when the next step is planned. So the next plan needs memory of its own, and the plan after it waits
    for the first copy.
    """

    def __init__(self, make: Callable[[], Any], device: torch.device) -> None:
        self._slots = [(make(), torch.cuda.Event()) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._device = device
        self._turn = 0

    def plan(self, *arguments: Any, **options: Any) -> Any:
        """Plan and return a wrapper; its plan is valid until the call after the next."""
        self._turn = 1 - self._turn
        wrapper, copied = self._slots[self._turn]
        copied.synchronize()
        wrapper.plan(*arguments, **options)
        copied.record(torch.cuda.current_stream(self._device))
        return wrapper


@frozen
class FlashInferPlan:
    """Arguments of XQA, or planned wrappers for decode, and planned wrappers for prefill."""

    num_decodes: int
    block_tables: torch.Tensor | None
    """[decodes, max_blocks] int32; None where XQA does not decode."""
    context_lens: torch.Tensor | None
    """[decodes, 1] uint32."""
    decodes: Mapping[int | None, Any]
    """Sliding window -> planned wrapper."""
    prefills: Mapping[int | None, Any]
    """Sliding window -> planned wrapper; empty without prefilling sequences."""


class FlashInferAttention(AttentionBackend[FlashInferOptions, FlashInferPlan]):
    """Paged attention in bfloat16 or float16 on NVIDIA GPUs."""

    api = "2"
    reads_float8 = True
    graphs: GraphSupport = "decode"
    options_class = FlashInferOptions

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        if device.type != "cuda":
            return f"FlashInfer runs on NVIDIA GPUs, not on {device.torch_name}; use another backend or --device cuda"
        if importlib.util.find_spec("flashinfer") is None:
            return f"FlashInfer is not installed; install it with `{install_command('flashinfer')}`"
        refusal = capability_refusal(device)
        if refusal is not None:
            return refusal
        if spec.dtype not in ("bfloat16", "float16"):
            return f"FlashInfer computes in bfloat16 or float16, not in {spec.dtype}; use --dtype bfloat16"
        refusal = kv_dtype_refusal(spec) or float8_refusal(spec, device)
        if refusal is not None:
            return refusal
        if spec.head_dim not in HEAD_DIMS:
            dims = " or ".join(map(str, HEAD_DIMS))
            return f"FlashInfer's kernels are for heads of {dims}, not {spec.head_dim}; use another backend"
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: FlashInferOptions) -> None:
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._caches = list(zip(pool.keys, pool.values, strict=True))
        self._scales = pool.scales
        self._wrapper_scales = [{"k_scale": one.key, "v_scale": one.value} for one in pool.scales]
        self._device = pool.keys[0].device
        # A window of at least the maximum context length hides nothing.
        self._windows = [None if w is None or w >= spec.max_len else w for w in spec.sliding_windows]
        capability = torch.cuda.get_device_capability(self._device)
        self._prefill_kernels = self._choose_prefill(options.prefill, capability)
        self._by_xqa = self._choose_xqa(options.decode, capability)
        self.graphs = "decode" if self._by_xqa else "none"
        begin = time.perf_counter()
        try:
            self._make(options)
            self._run_once()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise PluginError(
                f"FlashInfer's kernels could not be made ready: {type(error).__name__}: {reason}; "
                "nvcc of the CUDA toolkit must be installed to compile them; or use another backend"
            ) from error
        kernels = ", ".join(dict.fromkeys(self._prefill_kernels.values()))
        _log.info(
            "FlashInfer's kernels (prefill: %s; decode: %s) were ready after %.1f s",
            kernels,
            "xqa" if self._by_xqa else "wrapper",
            time.perf_counter() - begin,
        )

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> FlashInferPlan:
        count = batch.num_decodes
        block_tables = context_lens = None
        decodes: Mapping[int | None, Any] = {}
        prefills: Mapping[int | None, Any] = {}
        if count and self._by_xqa:
            block_tables = dense_rows(batch.block_tables[:count])
            context_lens = batch.context_lens[:count].view(torch.uint32).unsqueeze(1)
        elif count:
            decodes = self._plan_decodes(batch, slice(count))
        if count < batch.num_sequences:
            prefills = self._plan_prefills(batch, slice(count, None))
        return FlashInferPlan(count, block_tables, context_lens, decodes, prefills)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: FlashInferPlan
    ) -> torch.Tensor:
        out = q.new_empty(q.shape)
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: FlashInferPlan, out: torch.Tensor
    ) -> None:
        count = plan.num_decodes
        window = self._windows[layer]
        if self._xqa is not None and plan.block_tables is not None and plan.context_lens is not None:
            keys, values = self._caches[layer]
            scales = self._scales[layer]
            self._xqa(q[:count], keys, values, plan.block_tables, plan.context_lens, out[:count], scales)
        elif count:
            plan.decodes[window].run(q[:count], self._caches[layer], out=out[:count], **self._wrapper_scales[layer])
        if plan.prefills:
            plan.prefills[window].run(q[count:], self._caches[layer], out=out[count:], **self._wrapper_scales[layer])

    def _choose_prefill(self, wanted: str, capability: tuple[int, int]) -> dict[int | None, str]:
        """Choose the prefill kernel of each sliding window."""
        kernels = {}
        for window in dict.fromkeys(self._windows):
            refusal = fa3_refusal(self._spec, capability, window)
            if wanted == "fa3" and refusal:
                raise ConfigError(f"prefill = fa3 was asked of FlashInfer, but {refusal}; use auto or fa2")
            kernels[window] = "fa2" if wanted == "fa2" or refusal else "fa3"
        return kernels

    def _choose_xqa(self, wanted: str, capability: tuple[int, int]) -> bool:
        refusal = xqa_refusal(self._spec, capability)
        if wanted == "xqa" and refusal:
            raise ConfigError(f"decode = xqa was asked of FlashInfer, but {refusal}; use auto or wrapper")
        return wanted != "wrapper" and refusal is None

    def _make(self, options: FlashInferOptions) -> None:
        """Allocate workspaces and make the wrappers."""
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        spec, device = self._spec, self._device
        needs_workspace = not self._by_xqa or "fa2" in self._prefill_kernels.values()
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        size = options.workspace_bytes or (workspace_size(spec, multiprocessors) if needs_workspace else 2**20)
        # Shared by all wrappers: no kernel reads what another left there.
        workspace = torch.empty(size, dtype=torch.uint8, device=device)

        def prefill(kernel: str) -> _WrapperPair:
            return _WrapperPair(lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel), device)

        def decode() -> _WrapperPair:
            wide = spec.num_heads // spec.num_kv_heads >= TENSOR_CORE_GROUP
            return _WrapperPair(
                lambda: BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=wide), device
            )

        self._prefill_wrappers = {window: prefill(kernel) for window, kernel in self._prefill_kernels.items()}
        self._decode_wrappers = {} if self._by_xqa else {window: decode() for window in self._prefill_kernels}
        self._xqa = XqaDecode(spec, device) if self._by_xqa else None

    def _run_once(self) -> None:
        """Run every kernel once, which compiles or loads it, so that no request waits for that."""
        spec = self._spec
        q = torch.zeros(2, spec.num_heads, spec.head_dim, dtype=self._dtype, device=self._device)
        k = torch.zeros(2, spec.num_kv_heads, spec.head_dim, dtype=self._dtype, device=self._device)
        plan = self.plan(trial_batch(self._device))
        for layers in layers_by_window(spec).values():
            self.forward(layers[0], q, k, k, plan)
        torch.cuda.synchronize(self._device)

    def _lists(self, batch: ForwardBatch, which: slice, window: int | None) -> PageLists:
        return page_lists(
            batch.query_lens_host[which],
            batch.context_lens_host[which],
            batch.block_tables_host[which],
            self._spec.block_size,
            window,
        )

    def _plan_prefills(self, batch: ForwardBatch, which: slice) -> dict[int | None, Any]:
        longest, plans = int(batch.query_lens_host[which].max()), {}
        for window, wrappers in self._prefill_wrappers.items():
            starts, page_starts, last, lengths, pages = self._staged(self._lists(batch, which, window))
            plans[window] = wrappers.plan(
                starts,
                page_starts,
                pages,
                last,
                *self._shape,
                causal=True,
                max_token_per_sequence=longest,
                seq_lens=lengths,
                **self._scores(window),
            )
        return plans

    def _plan_decodes(self, batch: ForwardBatch, which: slice) -> dict[int | None, Any]:
        plans = {}
        for window, wrappers in self._decode_wrappers.items():
            _, page_starts, last, lengths, pages = self._staged(self._lists(batch, which, window))
            plans[window] = wrappers.plan(
                page_starts, pages, last, *self._shape, seq_lens=lengths, **self._scores(window)
            )
        return plans

    def _staged(self, lists: PageLists) -> list[torch.Tensor]:
        """Copy the arrays to pinned memory: FlashInfer reads them on the host and copies them asynchronously."""
        arrays = [
            lists.query_starts,
            lists.page_starts,
            lists.last_lengths,
            lists.context_lengths,
            lists.pages,
        ]
        # One allocation of pinned memory; torch keeps it until the copies from it are done.
        pinned = torch.from_numpy(np.concatenate(arrays)).pin_memory()
        return list(pinned.split_with_sizes([len(array) for array in arrays]))

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        spec = self._spec
        return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size

    def _scores(self, window: int | None) -> dict[str, Any]:
        """Arguments of all wrappers' plan(). FlashInfer's window excludes the token itself; -1: no window."""
        return {
            "sm_scale": self._spec.scale,
            "logits_soft_cap": self._spec.softcap,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._caches[0][0].dtype,
        }


def dense_rows(tables: torch.Tensor) -> torch.Tensor:
    """View a block table with contiguous rows over the same memory: [rows, columns] -> [rows, >= columns].

    The view includes the remaining columns of wider rows, so that a CUDA graph reads the table it was captured with.
    """
    rows, width = len(tables), tables.stride(0)
    if rows == 1 or width == tables.shape[1]:
        return tables
    return tables.as_strided((rows, width), (width, 1))
