"""Chooses an implementation for each autotuned op by measurement. Results are kept on disk, so a machine measures once.

`tune` collects the calls of all layers, groups them into tasks (op and row class), looks each task up in the cache,
measures those that are missing, stores their results, and sets each op's choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from engine.core.autotune.cache import TuningCache, default_directory, describe_machine
from engine.core.autotune.op import AutotunedCall
from engine.core.autotune.results import TuningResult, TuningResults
from engine.core.autotune.task import CandidateError, Timer, TuningTask
from engine.core.autotune.timer import GraphTimer, compile_candidates
from engine.core.errors import ExecutorError

if TYPE_CHECKING:
    from engine.core.layers.layer_factory import LayerFactory

log = logging.getLogger(__name__)

MAX_RELATIVE_TIME = 0.99
"""A candidate replaces the default if its time is at most this fraction of the default's: a smaller gain may be noise.
"""


@frozen(kw_only=True)
class TuningReport:
    """The outcome of `tune`."""

    results: tuple[TuningResult, ...]
    measured: int
    """Number of results that were not on disk."""
    seconds: float


def tune(layers: LayerFactory, directory: str = "", timer: Timer | None = None) -> TuningReport:
    """Choose the kernels of all layers, by cached results or else by measurement.

    layers: with Triton kernels, on a GPU, filled. directory: of the cache; empty: `default_directory`. Raises
    ExecutorError where no candidate of a task runs.
    """
    device = torch.device(layers.device)
    report = tune_tasks(collect_tasks(layers), open_cache(device, directory), timer or GraphTimer(device))
    for result in report.results:
        log.info("%s", result)
    log.info("kernels for few rows: %d of %d measured, %.1f s", report.measured, len(report.results), report.seconds)
    return report


def begin_tuning(layers: LayerFactory, directory: str = "") -> None:
    """Choose the kernels that cached results name, and begin to compile the candidates that `tune` will measure."""
    tasks = collect_tasks(layers)
    cache = open_cache(torch.device(layers.device), directory)
    _, missing = choose_known(tasks, cache.load(), cache.shipped())
    compile_candidates([(task, task.op.candidates(task.rows)) for task in missing])


def open_cache(device: torch.device, directory: str) -> TuningCache:
    """The cache of a device; directory: as for `tune`."""
    return TuningCache(Path(directory) if directory else default_directory(), describe_machine(device))


def collect_tasks(layers: LayerFactory) -> list[TuningTask]:
    """The tuning tasks of all layers."""
    return group_calls(call for layer in layers.layers for call in layer.autotuned_calls())


def group_calls(calls: Iterable[AutotunedCall]) -> list[TuningTask]:
    """Group calls into tasks, by key of the op and row class."""
    tasks: dict[tuple[str, int], TuningTask] = {}
    for call in calls:
        for rows in call.op.row_classes:
            tasks.setdefault((call.op.key, rows), TuningTask(rows=rows)).add(call.op, call.operands)
    return list(tasks.values())


def tune_tasks(tasks: Sequence[TuningTask], cache: TuningCache, timer: Timer) -> TuningReport:
    """Choose a candidate for each task. Tasks without a known result are measured and their results stored."""
    begin = time.perf_counter()
    own = dict(cache.load())
    known, missing = choose_known(tasks, own, cache.shipped())
    if missing:
        for task, timings in zip(missing, measure(missing, timer), strict=True):
            candidate, own[task.key] = pick_fastest(task, timings)
            known[task.key] = own[task.key]
            task.choose(candidate)
        cache.store(own)
    return TuningReport(
        results=tuple(known[task.key] for task in tasks),
        measured=len(missing),
        seconds=time.perf_counter() - begin,
    )


def choose_known(
    tasks: Iterable[TuningTask], *sources: TuningResults
) -> tuple[dict[tuple[str, int], TuningResult], list[TuningTask]]:
    """Use the candidates of known results, of the first source that has one that still holds.

    Returns these results, and the tasks without any.
    """
    known: dict[tuple[str, int], TuningResult] = {}
    missing = []
    for task in tasks:
        for results in sources:
            result = results.get(task.key)
            found = task.find(result)
            if result is not None and found:
                known[task.key] = result
                task.choose(found[0])
                break
        else:
            missing.append(task)
    return known, missing


def measure(tasks: Sequence[TuningTask], timer: Timer) -> list[dict[Any, float]]:
    """Seconds of each task's candidates that run: first those of `candidates`, then those of `refine`."""
    found = _measure([(task, task.op.candidates(task.rows)) for task in tasks], timer)
    finer = []
    for task, timings in zip(tasks, found, strict=True):
        more = task.op.refine(task.rows, sorted(timings, key=lambda one: timings[one])) if timings else ()
        finer.append((task, [one for one in more if one not in timings]))
    return [first | second for first, second in zip(found, _measure(finer, timer), strict=True)]


def _measure(wanted: Sequence[tuple[TuningTask, Sequence[Any]]], timer: Timer) -> list[dict[Any, float]]:
    timer.prepare(wanted)
    found: list[dict[Any, float]] = []
    for task, candidates in wanted:
        found.append({})
        for candidate in candidates:
            try:
                found[-1][candidate] = timer.seconds(task, candidate)
            except CandidateError as error:
                name = task.op.name(candidate)
                task.failures[name] = str(error)
                log.debug("%s, %d rows: %s is left out: %s", task.op.key, task.rows, name, error)
    return found


def pick_fastest(task: TuningTask, timings: Mapping[Any, float]) -> tuple[Any, TuningResult]:
    """The fastest candidate, or the default if no other gains enough. Raises ExecutorError where none runs."""
    op = task.op
    if not timings:
        name, why = next(iter(task.failures.items()))
        raise ExecutorError(
            f"none of {len(task.failures)} kernels for {op.key} at {task.rows} rows can run on this GPU; {name}: {why}."
            " --kernels plain leaves out the measurement"
        )
    default = op.candidates(task.rows)[0]
    best = min(timings, key=lambda one: timings[one])
    default_seconds = timings.get(default, float("inf"))
    if timings[best] > default_seconds * MAX_RELATIVE_TIME:
        best = default
    return best, TuningResult(
        op=op.key,
        rows=task.rows,
        version=op.version,
        candidate=op.name(best),
        seconds=timings[best],
        default=op.name(default),
        default_seconds=default_seconds,
    )
