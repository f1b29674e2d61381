"""Composite layers: the attention block and the gated MLP of a decoder layer, each with its norms.

They hide what makes their layers fast together: norm and activation quantize the input of the next linear layer, and
the result stays a `PartialSum`, which the next norm reduces over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from engine.core.distributed.partial_sum import PartialSum
from engine.core.layers.linear import PartialLinear

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.attention import Attention, GroupedAttention
    from engine.core.layers.linear import Linear, TensorOrQuantized
    from engine.core.layers.norm import Norm, ResidualAddition
    from engine.core.layers.rotary import Angles
    from engine.core.models.forward_pass import ForwardPass


class OutputProjection(Protocol):
    """The last layer of a block: a PartialLinear, or one of the layers below around it."""

    linear: Linear

    def __call__(self, x: TensorOrQuantized) -> torch.Tensor | PartialSum:
        """x: [..., this rank's in_features] -> [..., out_features]."""


class ScaledPartialLinear(PartialLinear):
    """A PartialLinear whose result is multiplied by a number."""

    def __init__(self, linear: Linear, group: RankGroup, scale: float) -> None:
        super().__init__(linear, group)
        self._scale = scale

    def __call__(self, x: TensorOrQuantized) -> PartialSum:
        return PartialSum(self.linear(x) * self._scale, self._group)


class NormedLinear:
    """A PartialLinear and a norm of its result, which reduces over the ranks."""

    def __init__(self, partial: PartialLinear, norm: Norm) -> None:
        self.linear = partial.linear
        self._partial = partial
        self._norm = norm

    def __call__(self, x: TensorOrQuantized) -> torch.Tensor:
        """x: [..., this rank's in_features] -> [..., out_features]."""
        return self._norm(self._partial(x))[0]


class AttentionBlock:
    """Input norm, projections to queries, keys and values, attention, output projection."""

    def __init__(
        self,
        norm: Norm | ResidualAddition,
        qkv: Linear,
        attention: Attention | GroupedAttention,
        output: OutputProjection,
    ) -> None:
        self._norm = norm
        self._qkv = qkv
        self._attention = attention
        self._output = output

    def __call__(
        self,
        run: ForwardPass,
        hidden: torch.Tensor | PartialSum,
        residual: torch.Tensor | None,
        angles: Angles | None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """Attention of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros. angles: None: queries and keys are not rotated.
        """
        normed, residual = self._norm.quantized_for(self._qkv, hidden, residual)
        return self._output(self._attention(run, self._qkv(normed), angles)), residual


class GatedMLP:
    """Input norm, gate and up projections, activation, down projection."""

    def __init__(self, norm: Norm | ResidualAddition, gate_up: Linear, down: OutputProjection) -> None:
        self._norm = norm
        self._gate_up = gate_up
        self._down = down

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The MLP of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros.
        """
        normed, residual = self._norm.quantized_for(self._gate_up, hidden, residual)
        return self._down(self._gate_up.gated_quantized_for(self._down.linear, normed)), residual


class MLP:
    """Input norm, up projection, activation, down projection."""

    def __init__(
        self,
        norm: Norm | ResidualAddition,
        up: Linear,
        activate: Callable[[torch.Tensor], torch.Tensor],
        down: OutputProjection,
    ) -> None:
        self._norm = norm
        self._up = up
        self._activate = activate
        self._down = down

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """As GatedMLP."""
        normed, residual = self._norm.quantized_for(self._up, hidden, residual)
        return self._down(self._activate(self._up(normed))), residual
