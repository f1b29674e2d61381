"""Attention by Triton kernels that read the paged cache in place: for decode and for prefill, with keys and values per
head (triton_paged) or a latent cache (triton_latent)."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, HeadRotation, KVPool
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError
from engine.core.extras import install_command
from engine.plugins.attention.refusals import capability_refusal, float8_refusal, kv_dtype_refusal
from engine.plugins.attention.triton_latent import LatentKernels, LatentPlan, latent_refusal
from engine.plugins.attention.triton_options import FP8, TritonOptions, float8_prefill_refusal
from engine.plugins.attention.triton_paged import PagedKernels, PagedPlan

_log = logging.getLogger(__name__)


class TritonAttention(AttentionBackend[TritonOptions, PagedPlan | LatentPlan]):
    """Paged, grouped-query, causal attention with optional sliding window, soft cap and sinks, or a latent cache."""

    api = "2"
    reads_float8 = True
    reads_latent = True
    reads_sinks = True
    options_class = TritonOptions
    graphs = "decode"

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        if device.type != "cuda":
            return f"its kernels run on a GPU, not on {device.torch_name}; use another backend or --device cuda"
        if importlib.util.find_spec("triton") is None:
            return f"triton is not installed; use another backend, or install it with `{install_command('triton')}`"
        refusal = capability_refusal(device)
        if refusal is not None:
            return refusal
        if spec.value_head_dim is not None and not spec.latent:
            return "it reads values of another size than keys from latent caches only; use another backend"
        if not spec.latent and (spec.head_dim % 16 or not 16 <= spec.head_dim <= 256):
            return f"it needs a head_dim that is a multiple of 16, up to 256, not {spec.head_dim}; use another backend"
        refusal = kv_dtype_refusal(spec) or float8_refusal(spec, device)
        return refusal or (latent_refusal(spec) if spec.latent else None)

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: TritonOptions) -> None:
        self._output_dim = spec.output_dim
        float8_prefill = options.prefill_dtype == FP8
        if float8_prefill:
            from engine.ops.common.launch import has_wgmma

            refusal = float8_prefill_refusal(spec, has_wgmma=has_wgmma(pool.keys[0].device))
            if refusal is not None:
                raise ConfigError(f"prefill_dtype = {FP8} was asked of the Triton backend, but {refusal}")
            _log.info("long prompts are computed in float8, short ones in %s", spec.dtype)
        if spec.latent:
            self._kernels: Any = LatentKernels(spec, pool)
        else:
            self._kernels = PagedKernels(spec, pool, float8_prefill=float8_prefill)

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        self._kernels.set_sinks(sinks)

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> PagedPlan | LatentPlan:
        plan: PagedPlan | LatentPlan = self._kernels.plan(batch)
        return plan

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PagedPlan | LatentPlan
    ) -> torch.Tensor:
        from engine.ops.common.row_memory import empty_with_room

        tokens, heads = q.shape[:2]
        out = empty_with_room(q, (tokens, heads * self._output_dim)).view(tokens, heads, self._output_dim)
        self._kernels.attend(layer, q, plan, out)
        return out

    def forward_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: PagedPlan | LatentPlan,
        out: torch.Tensor,
    ) -> None:
        self._kernels.attend(layer, q, plan, out)

    def rotate_and_forward(
        self, layer: int, qkv: torch.Tensor, rotation: HeadRotation, plan: PagedPlan | LatentPlan
    ) -> torch.Tensor | None:
        if isinstance(plan, LatentPlan):
            return None
        out: torch.Tensor | None = self._kernels.rotate_and_attend(layer, qkv, rotation, plan)
        return out
