"""Quantization: the contract of methods and their kernels of linear layers and experts; float8 and KV cache scales."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.quant.base import (
        ACTIVATIONS as ACTIVATIONS,
        Activation as Activation,
        FusedInputQuantization as FusedInputQuantization,
        KVScaleNames as KVScaleNames,
        LinearKernel as LinearKernel,
        LinearPart as LinearPart,
        LinearSpec as LinearSpec,
        Parallel as Parallel,
        QuantizedActivation as QuantizedActivation,
        QuantMethod as QuantMethod,
        StoredIn as StoredIn,
        TensorSpec as TensorSpec,
        stored_tensor as stored_tensor,
    )
    from engine.core.quant.experts import (
        ExpertsBias as ExpertsBias,
        ExpertsKernel as ExpertsKernel,
        ExpertsParallel as ExpertsParallel,
        ExpertsSpec as ExpertsSpec,
        Routing as Routing,
    )
    from engine.core.quant.float8 import (
        FLOAT8 as FLOAT8,
        FLOAT8_CAPABILITY as FLOAT8_CAPABILITY,
        FLOAT8_MAX as FLOAT8_MAX,
        KVScales as KVScales,
        has_float8 as has_float8,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "ACTIVATIONS",
        "Activation",
        "FusedInputQuantization",
        "KVScaleNames",
        "LinearKernel",
        "LinearPart",
        "LinearSpec",
        "Parallel",
        "QuantMethod",
        "QuantizedActivation",
        "StoredIn",
        "TensorSpec",
        "stored_tensor",
    ),
    experts=(
        "ExpertsBias",
        "ExpertsKernel",
        "ExpertsParallel",
        "ExpertsSpec",
        "Routing",
    ),
    float8=(
        "FLOAT8",
        "FLOAT8_CAPABILITY",
        "FLOAT8_MAX",
        "KVScales",
        "has_float8",
    ),
)
