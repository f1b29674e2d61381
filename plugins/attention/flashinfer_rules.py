"""Which of FlashInfer's kernels support which model, and the backend's options. Does not import FlashInfer."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from engine.core.attention import AttentionSpec
from engine.core.quant import FLOAT8
from engine.plugins.attention.option_checks import one_of

HEAD_DIMS = (64, 128, 256)
"""Head dimensions that all kernels below support."""
XQA_BLOCK_SIZES = (16, 32, 64, 128)
XQA_MAX_GROUP = 16
XQA_CAPABILITIES = (9, 10, 12)
"""Major compute capabilities."""
TENSOR_CORE_GROUP = 4
"""Minimum number of query heads per KV head for which the planned decode uses tensor cores."""


def _not_negative(_: Any, attribute: Attribute[int], value: int) -> None:
    if value < 0:
        raise ValueError(f"{value} is out of range; give 0 or more")


@frozen(kw_only=True)
class FlashInferOptions:
    """[attention.options] of this backend."""

    prefill: str = field(default="auto", validator=one_of("auto", "fa2", "fa3"))
    """FlashAttention 2 or 3 for prefill; auto: 3 where supported, which excludes float8 caches."""
    decode: str = field(default="auto", validator=one_of("auto", "xqa", "wrapper"))
    """XQA or the planned decode (BatchDecodeWithPagedKVCacheWrapper); auto: XQA where supported."""
    workspace_bytes: int = field(default=0, validator=_not_negative)
    """Memory for partial results of split contexts; 0: the maximum that FlashAttention 2 needs."""


def fa3_refusal(spec: AttentionSpec, capability: tuple[int, int], window: int | None) -> str | None:
    """Return why FlashAttention 3 cannot serve layers of this window; None if it can."""
    if capability[0] != 9:
        return f"it is made for compute capability 9.x (Hopper), not {capability[0]}.{capability[1]}"
    if spec.kv_dtype == FLOAT8:
        return f"it reads {FLOAT8} only with queries in {FLOAT8} too"
    if window is not None:
        # hopper/sparse_mainloop.cuh loads the values of tile 0 last, whichever tile the window begins in.
        return "its paged kernel is wrong with a sliding window"
    return None


def xqa_refusal(spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
    """Return why XQA cannot decode for this model; None if it can."""
    group = spec.num_heads // spec.num_kv_heads
    if capability[0] not in XQA_CAPABILITIES:
        return f"it is made for compute capability 9.0 and above, not {capability[0]}.{capability[1]}"
    if spec.softcap is not None:
        return "it does not cap scores"
    if spec.block_size not in XQA_BLOCK_SIZES:
        return f"it reads KV blocks of {' or '.join(map(str, XQA_BLOCK_SIZES))} tokens, not {spec.block_size}"
    if group > XQA_MAX_GROUP:
        return f"it takes at most {XQA_MAX_GROUP} query heads per KV head, not {group}"
    if any(window is not None and window < spec.max_len for window in spec.sliding_windows):
        # It gives their tokens a weight of 0, which does not cancel a NaN that another sequence wrote there.
        return "it reads blocks behind a sliding window, which may be another sequence's"
    return None


def workspace_size(spec: AttentionSpec, multiprocessors: int) -> int:
    """Return the maximum size of partial results: FlashAttention 2 splits contexts into two parts per multiprocessor.

    See PrefillPlan in FlashInfer's scheduler.cuh: per part a tile of rows, each row with its values and its sum.
    """
    rows = 128 if spec.head_dim < 256 else 64
    group = spec.num_heads // spec.num_kv_heads
    return 2 * multiprocessors * group * rows * (spec.head_dim + 1) * 4 + 2**20
