"""Sampling parameters of the running sequences on the device, one row per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.sampling.arithmetic import mix
from engine.core.types import SamplingParams


class SamplingTable:
    """Sampling parameters by row: rows 0 to max_running - 1 are for sequences; the next row is padding, and greedy; the
    others are draft rows (`copy_rows`).

    The tensors keep their addresses as long as the table exists, so that a captured CUDA graph may read them.
    """

    def __init__(self, max_running: int, device: torch.device, draft_rows: int = 0) -> None:
        self.padding_row = max_running
        self._device = device
        rows = max_running + 1 + draft_rows
        self.words = torch.zeros(2, rows, dtype=torch.int64, device=device)
        """The columns of 8 bytes."""
        self.numbers = torch.zeros(4, rows, dtype=torch.int32, device=device)
        """The columns of 4 bytes, those of float32 as their bits."""
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.keys = self.words[0]
        """int64: `mix` of the seed."""
        self.num_outputs = self.words[1]
        """int64: output tokens so far."""
        self.temperature = self.numbers[0].view(torch.float32)
        """float32; 0: the row is greedy."""
        self.top_p = self.numbers[1].view(torch.float32)
        """float32; 1: all tokens."""
        self.log_min_p = self.numbers[2].view(torch.float32)
        """float32; -inf: no min_p."""
        self.top_k = self.numbers[3]
        """int32; 0: all tokens."""
        self.top_p.fill_(1.0)
        self.log_min_p.fill_(-float("inf"))

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The table's columns by name, as `ops.sampling.sample.draw_rows` takes them."""
        return {
            "keys": self.keys,
            "num_outputs": self.num_outputs,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "log_min_p": self.log_min_p,
        }

    def write(self, rows: Sequence[int], params: Sequence[SamplingParams], num_outputs: Sequence[int]) -> None:
        """Assign rows, no row twice, to sequences with `num_outputs` output tokens so far. Does not wait
        for the device."""
        if not rows:
            return
        count = len(rows)
        staged = torch.empty(count * 40, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        words, numbers = _parts(staged, count)
        words[0] = torch.tensor(rows)
        words[1] = mix(torch.tensor([each.seed or 0 for each in params]))
        words[2] = torch.tensor(num_outputs)
        numbers[0].view(torch.float32)[:] = torch.tensor([0.0 if each.greedy else each.temperature for each in params])
        numbers[1].view(torch.float32)[:] = torch.tensor([each.top_p for each in params])
        numbers[2].view(torch.float32)[:] = torch.tensor([each.min_p for each in params]).log()
        numbers[3] = torch.tensor([min(each.top_k, 2**31 - 1) for each in params])
        words, numbers = _parts(staged.to(self._device, non_blocking=True), count)
        self.words.index_copy_(1, words[0], words[1:])
        self.numbers.index_copy_(1, words[0], numbers)

    def copy_rows(self, targets: torch.Tensor, sources: torch.Tensor, offsets: torch.Tensor) -> None:
        """Give draft rows the parameters of other rows, and `offsets` output tokens more; all [n] int64."""
        self.words.index_copy_(1, targets, self.words.index_select(1, sources))
        self.numbers.index_copy_(1, targets, self.numbers.index_select(1, sources))
        self.num_outputs.index_add_(0, targets, offsets)

    def advance(self, rows: torch.Tensor) -> None:
        """Add 1 to `num_outputs` of these rows; rows: [n] int64, the padding row any number of times."""
        self.num_outputs.index_add_(0, rows, self._one.expand(rows.shape))


def _parts(staged: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split bytes into (rows, keys, num_outputs) [3, count] int64 and the table's other columns [4, count] int32."""
    words, numbers = staged[: count * 24], staged[count * 24 :]
    return words.view(torch.int64).view(3, count), numbers.view(torch.int32).view(4, count)
