"""What sampling needs of each sequence, on the device, one row for each place among the running sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.sampling.ops import mix
from engine.core.types import SamplingParams


class SamplingTable:
    """Sampling parameters by row: rows 0 to max_running - 1 are given to sequences; the last one pads, and is greedy.

    The tensors stay where they are for the table's life, so that a captured CUDA graph may read them.
    """

    def __init__(self, max_running: int, device: torch.device) -> None:
        self.padding_row = max_running
        self._device = device
        self._words = torch.zeros(2, max_running + 1, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(4, max_running + 1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.keys = self._words[0]
        """int64: `mix` of the seed."""
        self.outputs = self._words[1]
        """int64: tokens put out so far."""
        self.temperature = self._numbers[0].view(torch.float32)
        """float32, 0 for a greedy row."""
        self.top_p = self._numbers[1].view(torch.float32)
        """float32; 1: all."""
        self.min_score = self._numbers[2].view(torch.float32)
        """float32: logarithm of min_p, -inf without."""
        self.top_k = self._numbers[3]
        """int32; 0: all."""
        self.top_p.fill_(1.0)
        self.min_score.fill_(-float("inf"))

    def write(self, rows: Sequence[int], params: Sequence[SamplingParams], outputs: Sequence[int]) -> None:
        """Give rows, no number twice, to sequences that have put out so many tokens. Does not wait for the device."""
        if not rows:
            return
        count = len(rows)
        staged = torch.empty(count * 40, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        words, numbers = _parts(staged, count)
        words[0] = torch.tensor(rows)
        words[1] = mix(torch.tensor([each.seed or 0 for each in params]))
        words[2] = torch.tensor(outputs)
        numbers[0].view(torch.float32)[:] = torch.tensor([0.0 if each.greedy else each.temperature for each in params])
        numbers[1].view(torch.float32)[:] = torch.tensor([each.top_p for each in params])
        numbers[2].view(torch.float32)[:] = torch.tensor([each.min_p for each in params]).log()
        numbers[3] = torch.tensor([min(each.top_k, 2**31 - 1) for each in params])
        words, numbers = _parts(staged.to(self._device, non_blocking=True), count)
        self._words.index_copy_(1, words[0], words[1:])
        self._numbers.index_copy_(1, words[0], numbers)

    def advance(self, rows: torch.Tensor) -> None:
        """Count one more token put out by each of these rows; rows: [n] int64, the padding row as often as need be."""
        self.outputs.index_add_(0, rows, self._one.expand(rows.shape))


def _parts(staged: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as (rows, keys, outputs) [3, count] int64, and the table's four numbers [4, count] int32."""
    words, numbers = staged[: count * 24], staged[count * 24 :]
    return words.view(torch.int64).view(3, count), numbers.view(torch.int32).view(4, count)
