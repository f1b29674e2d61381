"""Tensors of states: what layers keep per sequence instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.core.weights.host_memory import zeroed_tensor

StateTensors = Sequence[tuple[tuple[int, ...], str]]
"""(shape, dtype) of each tensor of one sequence's state in one layer."""


class StatePool:
    """The states of the layers of one cache group: per layer, a tuple of tensors [max_running + 1, *shape].

    A running sequence has a row (ForwardBatch.state_rows) from its admission until it finishes or is preempted. Nothing
    clears a row: a layer starts from its initial state where a sequence has no context before the batch. The last row
    is for padding.
    """

    def __init__(self, tensors: StateTensors, num_layers: int, max_running: int, device: torch.device | str) -> None:
        self.layers = [
            tuple(zeroed_tensor((max_running + 1, *shape), getattr(torch, dtype), device) for shape, dtype in tensors)
            for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_sequence(tensors: StateTensors) -> int:
        """Bytes of one sequence's state in one layer."""
        return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in tensors)
