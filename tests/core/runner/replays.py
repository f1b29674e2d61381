"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class ReplayByRunning:
    """Stands in for GraphCapturer: a replay runs the work again, into the same tensors."""

    captured = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[Callable[[], None], T]:
        type(self).captured += 1
        if warm_up is not None:
            warm_up()
        made = work()

        def replay() -> None:
            again = work()
            if isinstance(made, torch.Tensor):
                assert isinstance(again, torch.Tensor)
                made.copy_(again)

        return replay, made
