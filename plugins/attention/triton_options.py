"""The Triton backend's options, and what they need."""

from __future__ import annotations

from attrs import field, frozen

from engine.core.attention import AttentionSpec
from engine.core.quant import FLOAT8
from engine.plugins.attention.option_checks import one_of

FP8 = "fp8"


@frozen(kw_only=True)
class TritonOptions:
    """[attention.options] of this backend."""

    prefill_dtype: str = field(default="auto", validator=one_of("auto", FP8))
    """Type in which long prompts are multiplied; auto: that of the activations. fp8 needs a float8 KV cache and Hopper;
    it rounds queries and softmax weights to float8 (ops.attention.persistent_float8)."""


def float8_prefill_refusal(spec: AttentionSpec, *, has_wgmma: bool) -> str | None:
    """Return why prompts cannot be computed in float8, and what would work; None if they can.

    has_wgmma: whether the device has Hopper's matrix instruction.
    """
    from engine.ops.attention.float8_tiles import TILE
    from engine.ops.attention.persistent_float8 import BLOCK_M
    from engine.ops.attention.persistent_prefill import HEAD_DIMS

    rest = "or prefill_dtype=auto"
    if spec.latent:
        return "the cache is latent; use prefill_dtype=auto"
    if spec.kv_dtype != FLOAT8:
        return f"keys and values are stored in {spec.kv_dtype}; use --kv-dtype fp8, {rest}"
    if not has_wgmma:
        return "its kernel is made for compute capability 9.x (Hopper); use prefill_dtype=auto"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"activations are {spec.dtype}; use --dtype bfloat16, {rest}"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads have {' or '.join(map(str, HEAD_DIMS))} numbers, not {spec.head_dim}; use prefill_dtype=auto"
    if TILE % spec.block_size:
        return f"KV blocks of {spec.block_size} tokens do not divide {TILE}; use --block-size 16, {rest}"
    if spec.num_heads // spec.num_kv_heads > BLOCK_M:
        return f"there are more than {BLOCK_M} query heads per KV head; use prefill_dtype=auto"
    return None
