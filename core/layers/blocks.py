"""Composite layers: the attention block and the gated MLP of a decoder layer, each with its input norm.

They hide what makes their layers fast together: norm and activation quantize the input of the next linear layer, and
the result stays a `PartialSum`, which the next norm reduces over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.distributed.partial_sum import PartialSum

if TYPE_CHECKING:
    from engine.core.layers.attention import Attention
    from engine.core.layers.linear import Linear, PartialLinear
    from engine.core.layers.norm import RMSNorm
    from engine.core.layers.rotary import Angles
    from engine.core.models.forward_pass import ForwardPass


class AttentionBlock:
    """Input norm, projections to queries, keys and values, attention, output projection."""

    def __init__(self, norm: RMSNorm, qkv: Linear, attention: Attention, output: PartialLinear) -> None:
        self._norm = norm
        self._qkv = qkv
        self._attention = attention
        self._output = output

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[PartialSum, torch.Tensor]:
        """Attention of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros.
        """
        normed, residual = self._norm.quantized_for(self._qkv, hidden, residual)
        return self._output(self._attention(run, self._qkv(normed), angles)), residual


class GatedMLP:
    """Input norm, gate and up projections, activation, down projection."""

    def __init__(self, norm: RMSNorm, gate_up: Linear, down: PartialLinear) -> None:
        self._norm = norm
        self._gate_up = gate_up
        self._down = down

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[PartialSum, torch.Tensor]:
        """The MLP of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros.
        """
        normed, residual = self._norm.quantized_for(self._gate_up, hidden, residual)
        return self._down(self._gate_up.gated_quantized_for(self._down.linear, normed)), residual
