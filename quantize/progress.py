"""The receiver of a run's progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.quantize.report import LayerReport


class Progress:
    """Receives the progress of a run. This base class ignores it."""

    def resumed(self, done: int, total: int) -> None:
        """The run resumes after `done` of `total` layers."""

    def layer(self, report: LayerReport, total: int) -> None:
        """A layer is finished and written."""

    def phase(self, text: str) -> None:
        """Another phase starts."""

    def within(self, text: str, done: int, total: int) -> None:
        """The phase that `text` names has finished `done` of `total` parts. Called after each part."""
