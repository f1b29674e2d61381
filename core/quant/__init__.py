"""Quantization: the contract of a method and of its linear kernels, and the float8 KV cache."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.quant.base import (
        FusedInputQuantization as FusedInputQuantization,
        KVScaleNames as KVScaleNames,
        LinearKernel as LinearKernel,
        LinearPart as LinearPart,
        LinearSpec as LinearSpec,
        QuantizedActivation as QuantizedActivation,
        QuantMethod as QuantMethod,
        TensorSpec as TensorSpec,
    )
    from engine.core.quant.float8 import FLOAT8 as FLOAT8, LARGEST as LARGEST, KVScales as KVScales

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "KVScaleNames",
        "QuantizedActivation",
        "LinearKernel",
        "LinearPart",
        "LinearSpec",
        "FusedInputQuantization",
        "QuantMethod",
        "TensorSpec",
    ),
    float8=(
        "FLOAT8",
        "KVScales",
        "LARGEST",
    ),
)
