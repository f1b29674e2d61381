"""The fp8 method: float8 (e4m3) weights, from checkpoints of quant_method fp8 or compressed-tensors, or quantized while
loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.plugins.quant.rounding import BLOCK
from engine.plugins.quant.w8_kernel import STATIC, TOKEN, W8Dtype, W8Format
from engine.plugins.quant.w8_method import (
    GRANULARITIES,
    ActivationOptions,
    CompressedFormats,
    FormatSource,
    OneFormat,
    W8Method,
    one_of,
)

DTYPE: W8Dtype = "float8_e4m3fn"


@frozen(kw_only=True)
class Fp8Options(ActivationOptions):
    """Settings of the method (quant.options)."""

    granularity: str | None = one_of(*GRANULARITIES)
    """What shares a scale when an unquantized checkpoint is quantized. Not given: channel."""


class Fp8(W8Method[Fp8Options]):
    """float8 weights: half the bytes of 16-bit weights to read, and from compute capability 8.9 on twice their rate."""

    name: ClassVar[str] = "fp8"
    options_class: ClassVar[type | None] = Fp8Options

    @classmethod
    def online(cls, options: Fp8Options | None) -> W8Format:
        """A scale per output, and activations quantized per token, unless options say otherwise."""
        granularity = None if options is None else options.granularity
        return W8Format(dtype=DTYPE, granularity=GRANULARITIES[granularity or "channel"], activations=TOKEN)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """quant_method fp8 (per tensor, or in blocks of 128 x 128) or compressed-tensors (float-quantized)."""
        method = checkpoint.get("quant_method")
        if method == "fp8":
            return OneFormat.parse(fp8_format(checkpoint), checkpoint)
        if method == "compressed-tensors":
            found = CompressedFormats.parse(checkpoint)
            if DTYPE in found.dtypes:
                return found
            raise CheckpointError("the checkpoint has int8 weights and no float8 ones; choose --quant int8 or auto")
        raise CheckpointError(
            f"the checkpoint's weights are quantized by {method!r} already, and quantizing them again would only lose"
            " precision; leave --quant out to use the plugin made for it, or take an unquantized checkpoint"
        )


def fp8_format(config: Mapping[str, Any]) -> W8Format:
    """The format of quant_method fp8. Raises CheckpointError, naming the key, for one that is not supported."""
    number = config.get("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quantization_config: fmt is {number!r}; only e4m3 is supported")
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"quantization_config: activation_scheme is {scheme!r}; use dynamic or static")
    block = config.get("weight_block_size")
    if block is None:
        static = scheme == "static"
        return W8Format(
            dtype=DTYPE,
            granularity="tensor",
            activations=STATIC if static else TOKEN,
            scale_names=("weight_scale", "weight_scale_inv"),
            input_scale_names=("input_scale", "activation_scale") if static else (),
        )
    if list(block) != [BLOCK, BLOCK]:
        raise CheckpointError(f"quantization_config: weight_block_size is {block}; only {[BLOCK, BLOCK]} is supported")
    if scheme != "dynamic":
        raise CheckpointError("quantization_config: weight_block_size needs activation_scheme dynamic, not static")
    # In spite of its name, weights are multiplied by weight_scale_inv.
    return W8Format(dtype=DTYPE, granularity="block", activations=TOKEN, scale_names=("weight_scale_inv",))
