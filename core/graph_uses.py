"""Counts how often steps run in CUDA graphs, by the size of the graphs, and what padding costs."""

from __future__ import annotations

from engine.core.types import Step


class GraphUses:
    """Counts the steps that ran in CUDA graphs, and those that did not although there are graphs."""

    def __init__(self) -> None:
        self.misses: int | None = None
        """Steps that ran without graphs; None until a step has said that there are graphs."""
        self._replays: dict[tuple[str, int], list[int]] = {}
        """(kind of step, size) -> [steps, padding in them]."""

    def count(self, step: Step, size: int) -> None:
        """Count a step; size: StepResult.graph_size."""
        self.misses = self.misses or 0
        if not size:
            self.misses += step.iterations
            return
        used = step.decode_rows + sum(chunk.count for chunk in step.chunks)
        kind = "prefill" if step.chunks else "verify" if step.drafts else "decode"
        counts = self._replays.setdefault((kind, size), [0, 0])
        counts[0] += step.iterations
        counts[1] += (size - used) * step.iterations

    def replays(self) -> tuple[tuple[str, int, int, int], ...]:
        """The counts, in the form of EngineStats.graph_replays."""
        return tuple((kind, size, steps, padding) for (kind, size), (steps, padding) in sorted(self._replays.items()))
