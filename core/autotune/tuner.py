"""Chooses by measurement, once a machine, how each linear layer is multiplied by few rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import field, frozen

from engine.core.autotune.cache import TuningCache, TuningResult, default_directory, describe_machine
from engine.core.autotune.op import AutotunedCall, AutotunedOp, Operands
from engine.core.errors import ExecutorError
from engine.core.layers.factory import LayerFactory

log = logging.getLogger(__name__)

NEEDED_GAIN = 0.99
"""A kernel replaces the usual one if it takes at most this share of its time: less may be noise."""


class CandidateError(Exception):
    """A candidate does not compile, or wants more than the GPU has: why."""


@frozen(kw_only=True, eq=False)
class TuningTask:
    """One class of rows of all multiplications with one key."""

    rows: int
    tunables: list[AutotunedOp[Any]] = field(factory=list)
    """Equals, each with a choice of its own."""
    operands: list[Operands] = field(factory=list)
    """Of all layers."""
    failures: dict[str, str] = field(factory=dict)
    """Candidates that cannot run, and why."""

    @property
    def tunable(self) -> AutotunedOp[Any]:
        """That is measured for all."""
        return self.tunables[0]

    @property
    def place(self) -> tuple[str, int]:
        """In the cache."""
        return self.tunable.key, self.rows

    def add(self, tunable: AutotunedOp[Any], operands: Operands) -> None:
        """One more layer."""
        if not any(tunable is one for one in self.tunables):
            self.tunables.append(tunable)
        self.operands.append(operands)

    def find(self, choice: TuningResult | None) -> list[Any]:
        """The candidate of a choice, alone; empty: there is no such choice, or it does not hold any more."""
        tunable = self.tunable
        if choice is None or choice.version != tunable.version:
            return []
        first = tunable.candidates(self.rows)
        every = [*first, *(more for one in first for more in tunable.refine(self.rows, [one]))]
        return [one for one in every if tunable.name(one) == choice.kernel][:1]

    def choose(self, candidate: Any) -> None:
        """For all layers."""
        for tunable in self.tunables:
            tunable.choose(self.rows, candidate)


class Timer(Protocol):
    """Measures candidates."""

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """Told in advance of the candidates that `seconds` will be asked for, so that they compile together."""

    def seconds(self, work: TuningTask, candidate: Any) -> float:
        """Of one multiplication, with weights that are in no cache. Raises CandidateError."""


@frozen(kw_only=True)
class TuningReport:
    """What `tune` did."""

    choices: tuple[TuningResult, ...]
    measured: int
    """How many were not on disk."""
    seconds: float


def tune(layers: LayerFactory, directory: str = "", timer: Timer | None = None) -> TuningReport:
    """Set the kernels of all layers that have a choice, by what is on disk or else by measurement.

    layers: fused ones on a GPU, filled. directory: of the cache; empty: `default_directory`. Raises ExecutorError where
    no candidate runs.
    """
    from engine.core.autotune.timer import GraphTimer

    device = torch.device(layers.device)
    cache = TuningCache(Path(directory) if directory else default_directory(), describe_machine(device))
    report = apply(collect(layers), cache, timer or GraphTimer(device))
    for choice in report.choices:
        log.info("%s", choice)
    log.info("kernels for few rows: %d of %d measured, %.1f s", report.measured, len(report.choices), report.seconds)
    return report


def collect(layers: LayerFactory) -> list[TuningTask]:
    """The multiplications of all layers that have a choice, by key and class of rows."""
    return group(one for layer in layers.layers for one in layer.autotuned_calls())


def group(multiplications: Iterable[AutotunedCall]) -> list[TuningTask]:
    """By key and class of rows."""
    works: dict[tuple[str, int], TuningTask] = {}
    for one in multiplications:
        for rows in one.tunable.classes:
            works.setdefault((one.tunable.key, rows), TuningTask(rows=rows)).add(one.tunable, one.operands)
    return list(works.values())


def apply(works: Sequence[TuningTask], cache: TuningCache, timer: Timer) -> TuningReport:
    """Set the kernels of `works`: what the cache lacks is measured and added to it."""
    begin = time.perf_counter()
    known = dict(cache.load())
    missing = []
    for work in works:
        found = work.find(known.get(work.place))
        for candidate in found:
            work.choose(candidate)
        if not found:
            missing.append(work)
    if missing:
        for work, timings in zip(missing, measure(missing, timer), strict=True):
            candidate, known[work.place] = decide(work, timings)
            work.choose(candidate)
        cache.store(known)
    return TuningReport(
        choices=tuple(known[work.place] for work in works),
        measured=len(missing),
        seconds=time.perf_counter() - begin,
    )


def measure(works: Sequence[TuningTask], timer: Timer) -> list[dict[Any, float]]:
    """Seconds of each work's candidates that can run, then of those that refine them."""
    found = _measure([(work, work.tunable.candidates(work.rows)) for work in works], timer)
    finer = []
    for work, timings in zip(works, found, strict=True):
        more = work.tunable.refine(work.rows, sorted(timings, key=lambda one: timings[one])) if timings else ()
        finer.append((work, [one for one in more if one not in timings]))
    return [first | second for first, second in zip(found, _measure(finer, timer), strict=True)]


def _measure(wanted: Sequence[tuple[TuningTask, Sequence[Any]]], timer: Timer) -> list[dict[Any, float]]:
    timer.prepare(wanted)
    found: list[dict[Any, float]] = []
    for work, candidates in wanted:
        found.append({})
        for candidate in candidates:
            try:
                found[-1][candidate] = timer.seconds(work, candidate)
            except CandidateError as error:
                name = work.tunable.name(candidate)
                work.failures[name] = str(error)
                log.debug("%s, %d rows: %s is left out: %s", work.tunable.key, work.rows, name, error)
    return found


def decide(work: TuningTask, timings: Mapping[Any, float]) -> tuple[Any, TuningResult]:
    """The fastest candidate; the usual one unless that gains. Raises ExecutorError where none can run."""
    tunable = work.tunable
    if not timings:
        name, why = next(iter(work.failures.items()))
        raise ExecutorError(
            f"none of {len(work.failures)} kernels for {tunable.key} at {work.rows} rows can run on this GPU; {name}:"
            f" {why}. --kernels plain leaves out the measurement"
        )
    usual = tunable.candidates(work.rows)[0]
    best = min(timings, key=lambda one: timings[one])
    usual_seconds = timings.get(usual, float("inf"))
    if timings[best] > usual_seconds * NEEDED_GAIN:
        best = usual
    return best, TuningResult(
        problem=tunable.key,
        rows=work.rows,
        version=tunable.version,
        kernel=tunable.name(best),
        seconds=timings[best],
        usual=tunable.name(usual),
        usual_seconds=usual_seconds,
    )
