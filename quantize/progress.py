"""Who is told how far a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.quantize.report import LayerReport


class Progress:
    """Told what happens; this one keeps silent."""

    def resumed(self, done: int, total: int) -> None:
        """An earlier run has finished `done` layers of `total`."""

    def layer(self, report: LayerReport, total: int) -> None:
        """A layer is finished, and written."""

    def phase(self, text: str) -> None:
        """Something else begins."""
