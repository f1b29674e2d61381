"""An engine whose steps fail on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.core import Engine, SamplingParams
from engine.plugins.attention.torch import TorchAttention

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(4)]


class FailingAttention(TorchAttention):
    """Raises `error`, if set."""

    error: BaseException | None = None

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(layer, q, k, v, plan)


def build(checkpoint: Path, **settings: Any) -> Engine:
    usual = {"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), attention=FailingAttention, **{**usual, **settings})
