"""A simulated engine for choices of draft lengths: drafts are accepted by chance, and steps have known costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from engine.core.speculators import DraftLengths, StepCosts

CURVES: Final[dict[str, Callable[[int], float]]] = {
    "bound by memory": lambda rows: 100 + 0.05 * rows,
    "memory, then compute": lambda rows: max(5200 + 6 * rows, 2600 + 24 * rows),
    "a laptop": lambda rows: 20 + 10 * rows,
    "CUDA graphs of 8, 16, ... rows": lambda rows: 100 + 15 * (-(-rows // 8) - 1),
    "bound by compute": lambda rows: 10 * rows,
}
MEASURED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_DRAFTS = 5
Acceptance = float | tuple[float, ...] | Callable[[int], float]
"""Of all requests, of requests in turn, or by step."""


def costs_of(curve: str) -> StepCosts:
    graphs = curve.startswith("CUDA")
    measured = range(8, 520, 8) if graphs else MEASURED
    return StepCosts([(rows, CURVES[curve](rows)) for rows in measured], padded=graphs)


def acceptance_of(acceptance: Acceptance, request: int, step: int) -> float:
    if isinstance(acceptance, tuple):
        return acceptance[request % len(acceptance)]
    return acceptance if isinstance(acceptance, float) else acceptance(step)


class Simulation:
    """Runs `batch` requests at a time; each that ends is replaced. fixed: this many drafts always; None: adaptive.

    gap: for how long the device is idle before a step that was planned after the result of the step before it; 0: steps
    do not overlap. first_use: how many times as long the first step of each number of rows takes, by
    eights.
    """

    def __init__(
        self,
        curve: str,
        batch: int,
        acceptance: Acceptance,
        *,
        fixed: int | None = None,
        gap: float = 0,
        first_use: float = 1,
    ) -> None:
        self.curve, self.batch, self.acceptance, self.fixed = CURVES[curve], batch, acceptance, fixed
        self.gap, self.first_use = gap, first_use
        self.used: set[int] = set()
        self.lengths = DraftLengths(costs_of(curve), MAX_DRAFTS, overlaps=gap > 0)
        self.waits = False
        self.pick = random.Random(1)
        self.left = [self.pick.randint(50, 300) for _ in range(batch)]
        self.requests = list(range(batch))
        self.step = 0
        self.tokens = self.drafts = 0
        self.time = 0.0

    def run(self, steps: int) -> float:
        """Tokens per time of these steps, next to those without drafts."""
        tokens, time = self.tokens, self.time
        for _ in range(steps):
            self._step()
        return (self.tokens - tokens) / (self.time - time) / (self.batch / self.curve(self.batch))

    def _chosen(self) -> dict[int, int]:
        if self.fixed is not None:
            self.waits = self.fixed > 0
            return dict.fromkeys(self.requests, self.fixed) if self.fixed else {}
        if not self.lengths.begin(self.batch, self.batch):
            return {}
        names = [str(request) for request in self.requests]
        asked = list(zip(names, self.lengths.limits(names), strict=True))
        if self.gap and not self.waits:
            self.waits = self.lengths.pays(asked)
            if not self.waits:
                return {}
        chosen = self.lengths.choose(asked)
        return {request: count for request, count in zip(self.requests, chosen, strict=True) if count}

    def _step(self) -> None:
        chosen = self._chosen()
        drafts = sum(chosen.values())
        self.drafts += drafts
        rows = self.batch + drafts
        graph = -(-rows // 8)
        time = self.curve(rows) * (1 if graph in self.used else self.first_use)
        self.used.add(graph)
        self.time += time + self.gap * self.waits
        self.waits = drafts > 0
        if self.fixed is None:
            if drafts:
                self.lengths.probed(rows, time)
            self.lengths.observe(rows, time, drafts=drafts > 0)
            if drafts and self.gap:
                self.lengths.gaps.observe(self.gap, self.batch)
            if drafts:
                self.lengths.prepare()
        for place, request in enumerate(self.requests):
            accepted, acceptance = 0, acceptance_of(self.acceptance, request, self.step)
            while accepted < chosen.get(request, 0) and self.pick.random() < acceptance:
                accepted += 1
            if request in chosen and self.fixed is None:
                self.lengths.record([(str(request), chosen[request], accepted)])
            self.tokens += accepted + 1
            self.left[place] -= accepted + 1
            if self.left[place] <= 0:
                self.lengths.finished(str(request))
                self.requests[place] = max(self.requests) + 1
                self.left[place] = self.pick.randint(50, 300)
        self.step += 1
