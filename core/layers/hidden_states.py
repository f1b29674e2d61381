"""Keeps the hidden states between some decoder layers of a model, for a speculator that computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.core.distributed.scattered_rows import whole_rows
from engine.core.layers.blocks import AttentionBlock

if TYPE_CHECKING:
    from engine.core.distributed.partial_sum import PartialSum
    from engine.core.layers.norm import Norm
    from engine.core.layers.rotary import Angles
    from engine.core.models.forward_pass import ForwardPass


class HiddenStates:
    """The hidden states entering some layers in the latest forward pass, in memory that CUDA graphs can write to."""

    def __init__(
        self, layers: Sequence[int], hidden_size: int, *, max_rows: int, dtype: torch.dtype, device: str
    ) -> None:
        """layers: numbers of decoder layers, which may repeat; the number of layers stands for the final norm, whose
        input is the output of the last layer. max_rows: tokens of the largest forward pass."""
        self._places: dict[int, list[int]] = {}
        """Layer -> the multiples of the hidden size at which its columns begin."""
        for place, layer in enumerate(layers):
            self._places.setdefault(layer, []).append(place)
        self._states = torch.zeros(max_rows, len(layers) * hidden_size, dtype=dtype, device=device)
        self._hidden_size = hidden_size
        self.missing = set(layers)
        """Layers whose states nothing stores; empty once the model is made."""

    def has(self, layer: int) -> bool:
        """Whether the states entering a layer are to be kept."""
        return layer in self._places

    def store(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep the states entering a layer: [tokens, hidden_size]."""
        for place in self._places[layer]:
            begin = place * self._hidden_size
            self._states[: len(hidden), begin : begin + self._hidden_size].copy_(hidden)

    def rows(self, count: int) -> torch.Tensor:
        """The states of the first `count` tokens, the layers' states side by side: [count, layers * hidden_size];
        the next forward pass overwrites them."""
        return self._states[:count]

    @property
    def nbytes(self) -> int:
        """Bytes of the kept hidden states."""
        return self._states.nbytes


class StoringAttentionBlock:
    """An attention block that stores the hidden states entering its layer."""

    def __init__(self, block: AttentionBlock, layer: int, states: HiddenStates) -> None:
        self._block = block
        self._layer = layer
        self._states = states
        states.missing.discard(layer)

    def __call__(
        self,
        run: ForwardPass,
        hidden: torch.Tensor | PartialSum,
        residual: torch.Tensor | None,
        angles: Angles | None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """As AttentionBlock."""
        hidden, residual = self._block(run, hidden, residual, angles)
        self._states.store(self._layer, whole_rows(residual))  # now, since the next layer may overwrite it
        return hidden, residual


class StoringNorm:
    """The norm after the last decoder layer, which stores the hidden states that enter it."""

    def __init__(self, norm: Norm, num_layers: int, states: HiddenStates) -> None:
        self._norm = norm
        self._num_layers = num_layers
        self._states = states
        states.missing.discard(num_layers)

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As RMSNorm."""
        normed, total = self._norm(x, residual)
        self._states.store(self._num_layers, whole_rows(total))
        return normed, total
