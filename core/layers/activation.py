"""Activation functions, by PyTorch operations: of the gate, times the up projection, or of a layer without gate."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from engine.core.errors import ConfigError
from engine.core.quant.base import Activation

SWIGLU_OAI_SLOPE = 1.702
SWIGLU_OAI_LIMIT = 7.0
"""Limit of the gate, from above, and of the up projection, from both sides."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. x: [..., 2 * size], gate before up -> [..., size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up by the approximation with tanh; shapes as in silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up by the error function; shapes as in silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def swiglu_oai_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The clamped SwiGLU of gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1); shapes as in silu_and_mul.

    gpt-oss stores gate and up rows alternately: a layer puts the gate first when it loads them.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_OAI_LIMIT)
    up = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gate.mul(SWIGLU_OAI_SLOPE).sigmoid_().mul_(gate).mul_(up.add_(1.0))


_FUNCTIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
    "swiglu_oai": swiglu_oai_and_mul,
}


def ungated_activation(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that activates a layer without a gate. Raises ConfigError for an activation that needs one."""
    functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
    }
    if activation not in functions:
        raise ConfigError(f"{activation} needs a gate; use one of {', '.join(functions)} for a layer without")
    return functions[activation]


def gated_activation(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that activates a gated layer: x [..., 2 * size], gate before up -> [..., size]."""
    return _FUNCTIONS[activation]
