"""The fp8 method: float8 (e4m3) weights, from checkpoints of quant_method fp8, fbgemm_fp8 or compressed-tensors, or
quantized while loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys
from engine.plugins.quant.quantization_config import COMPRESSED_KEYS
from engine.plugins.quant.rounding import BLOCK
from engine.plugins.quant.w8_formats import GRANULARITIES, CompressedFormats, FormatSource, OneFormat
from engine.plugins.quant.w8_kernel import NONE, STATIC, TOKEN, Activations, W8Dtype, W8Format
from engine.plugins.quant.w8_method import ActivationOptions, W8Method, one_of, other_method

DTYPE: W8Dtype = "float8_e4m3fn"
UNQUANTIZED = ("modules_to_not_convert", "ignored_layers", "ignore")
KEYS = QuantKeys(
    read=frozenset(
        {
            *UNQUANTIZED,
            "activation_scheme",
            "dequantize",
            "fmt",
            "kv_cache_scheme",
            "scale_fmt",
            "weight_block_size",
        }
    ),
    neutral={
        "expert_dtype": (None, "fp8"),
        "export": (None,),  # of Quark, whose older files have this quant_method too
        "modules_to_convert": (None, []),
    },
    without_effect=BY_PROGRAM | {"is_checkpoint_fp8_serialized"},
)
"""Keys of quant_method fp8."""
FBGEMM_KEYS = QuantKeys(read=frozenset({*UNQUANTIZED, "activation_scale_ub"}))
"""Keys of quant_method fbgemm_fp8."""


@frozen(kw_only=True)
class Fp8Options(ActivationOptions):
    """Settings of the method (quant.options)."""

    granularity: str | None = one_of(*GRANULARITIES)
    """What shares a scale when an unquantized checkpoint is quantized. Not given: channel."""


class Fp8(W8Method[Fp8Options]):
    """float8 weights: half the bytes of 16-bit weights, and from compute capability 8.9 on twice their matmul rate."""

    name: ClassVar[str] = "fp8"
    options_class: ClassVar[type | None] = Fp8Options

    @classmethod
    def keys(cls, checkpoint: Mapping[str, Any]) -> QuantKeys:
        return {"fp8": KEYS, "fbgemm_fp8": FBGEMM_KEYS}.get(str(checkpoint.get("quant_method")), COMPRESSED_KEYS)

    @classmethod
    def online(cls, options: Fp8Options | None) -> W8Format:
        """A scale per output, unless options name another granularity; activations are quantized per token."""
        granularity = None if options is None else options.granularity
        return W8Format(dtype=DTYPE, granularity=GRANULARITIES[granularity or "channel"], activations=TOKEN)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """Read a checkpoint of quant_method fp8 (per tensor, or in blocks of 128 x 128), fbgemm_fp8 or
        compressed-tensors (float-quantized)."""
        method = checkpoint.get("quant_method")
        if method == "fp8":
            return OneFormat.parse(fp8_format(checkpoint), checkpoint)
        if method == "fbgemm_fp8":
            return OneFormat.parse(fbgemm_format(checkpoint), checkpoint)
        if method == "compressed-tensors":
            found = CompressedFormats.parse(checkpoint)
            if DTYPE in found.dtypes:
                return found
            raise CheckpointError("the checkpoint has int8 weights and no float8 ones; choose --quant int8 or auto")
        raise other_method(method)


def fp8_format(config: Mapping[str, Any]) -> W8Format:
    """The format of quant_method fp8. Raises CheckpointError, naming the key, for one that is not supported.

    Source: transformers (FineGrainedFP8Config, integrations/finegrained_fp8.py), vLLM (fp8.py).
    """
    KEYS.check(config)
    number = config.get("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quantization_config: fmt is {number!r}; only e4m3 is supported")
    scheme = str(config.get("activation_scheme", "dynamic")).lower()
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"quantization_config: activation_scheme is {scheme!r}; use dynamic or static")
    scale_type = config.get("scale_fmt") or "float"
    if scale_type not in ("float", "ue8m0"):
        raise CheckpointError(f"quantization_config: scale_fmt is {scale_type!r}; use float or ue8m0")
    static = scheme == "static"
    activations: Activations = NONE if config.get("dequantize") else STATIC if static else TOKEN
    block = config.get("weight_block_size")
    if block is None:
        return W8Format(
            dtype=DTYPE,
            granularity="tensor",
            activations=activations,
            scale_names=("weight_scale", "weight_scale_inv"),
            input_scale_names=("input_scale", "activation_scale") if static else (),
        )
    if list(block) != [BLOCK, BLOCK]:
        raise CheckpointError(f"quantization_config: weight_block_size is {block}; only {[BLOCK, BLOCK]} is supported")
    if static:
        raise CheckpointError("quantization_config: weight_block_size needs activation_scheme dynamic, not static")
    # In spite of its name, weights are multiplied by weight_scale_inv.
    return W8Format(
        dtype=DTYPE,
        granularity="block",
        activations=activations,
        scale_names=("weight_scale_inv",),
        powers_of_two=scale_type == "ue8m0",
    )


def fbgemm_format(config: Mapping[str, Any]) -> W8Format:
    """The format of quant_method fbgemm_fp8. Raises CheckpointError for an invalid activation_scale_ub.

    Source: transformers (FbgemmFp8Config, integrations/fbgemm_fp8.py).
    """
    FBGEMM_KEYS.check(config)
    bound = config.get("activation_scale_ub", 1200.0)
    if type(bound) not in (int, float) or not 0 < bound < float("inf"):
        raise CheckpointError(f"quantization_config: activation_scale_ub is {bound!r}; it must be a positive number")
    return W8Format(
        dtype=DTYPE,
        granularity="channel",
        activations=TOKEN,
        scale_names=("weight_scale",),
        max_activation=float(bound),
    )
