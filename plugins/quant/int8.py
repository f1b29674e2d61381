"""The int8 method: int8 weights and activations (W8A8), from compressed-tensors checkpoints or quantized while
loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.core.errors import CheckpointError
from engine.plugins.quant.w8_formats import CompressedFormats, FormatSource
from engine.plugins.quant.w8_kernel import TOKEN, W8Dtype, W8Format
from engine.plugins.quant.w8_method import ActivationOptions, W8Method, other_method

DTYPE: W8Dtype = "int8"


class Int8(W8Method[ActivationOptions]):
    """int8 weights, multiplied in integer arithmetic: on GPUs from compute capability 8.0 on, and on CPUs."""

    name: ClassVar[str] = "int8"
    options_class: ClassVar[type | None] = ActivationOptions

    @classmethod
    def online(cls, options: ActivationOptions | None) -> W8Format:
        """A scale per output; activations are quantized per token."""
        return W8Format(dtype=DTYPE, granularity="channel", activations=TOKEN)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """Read a compressed-tensors checkpoint of format int-quantized."""
        method = checkpoint.get("quant_method")
        if method == "compressed-tensors":
            found = CompressedFormats.parse(checkpoint)
            if found.dtypes == {DTYPE}:
                return found
            raise CheckpointError("the checkpoint has float8 weights; choose --quant fp8 or auto")
        raise other_method(method)
