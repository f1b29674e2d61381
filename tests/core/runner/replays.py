"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


class ReplayByRunning:
    """Stands in for GraphCapturer: a replay runs the work again, into the same tensors."""

    captured = 0

    def __init__(self, device: torch.device, *, extends: bool = True) -> None:
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

    def capture_alike(
        self, begin: Callable[[], T], endings: Iterable[Callable[[T], U]], warm_up: Callable[[], object]
    ) -> list[tuple[Callable[[], None], U]]:
        warm_up()
        return [self._capture_ending(begin, ending) for ending in endings]

    def _capture_ending(self, begin: Callable[[], T], ending: Callable[[T], U]) -> tuple[Callable[[], None], U]:
        return self.capture(lambda: ending(begin()))
