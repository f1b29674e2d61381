"""int8 weights and activations (W8A8): checkpoints of compressed-tensors, and plain ones while they load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.core.errors import CheckpointError
from engine.plugins.quant.w8_kernel import TOKEN, W8Format
from engine.plugins.quant.w8_method import ActivationOptions, CompressedFormats, FormatSource, W8Method

CODES = "int8"


class Int8(W8Method[ActivationOptions]):
    """Weights of one byte, multiplied as integers, on any GPU from capability 8.0 on and on a CPU."""

    name: ClassVar[str] = "int8"
    options_class: ClassVar[type | None] = ActivationOptions

    @classmethod
    def online(cls, options: ActivationOptions | None) -> W8Format:
        """A scale an output, activations quantized per token unless options say otherwise."""
        return W8Format(dtype=CODES, granularity="channel", activations=TOKEN)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """compressed-tensors (int-quantized)."""
        method = checkpoint.get("quant_method")
        if method == "compressed-tensors":
            found = CompressedFormats.parse(checkpoint)
            if found.dtypes == {CODES}:
                return found
            raise CheckpointError("the checkpoint has float8 weights; choose --quant fp8 or auto")
        raise CheckpointError(
            f"the checkpoint's weights are quantized by {method!r} already, and quantizing them again would only lose"
            " digits; leave --quant out to use the plugin made for it, or take an unquantized checkpoint"
        )
