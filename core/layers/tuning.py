"""Chooses by measurement, once a machine, how each linear layer is multiplied by few rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from attrs import frozen

from engine.core.kernels.skinny_launch import Problem, Tile, candidates, with_ahead
from engine.core.layers.factory import LayerFactory
from engine.core.layers.fused import FusedLMHead
from engine.core.layers.linear import Linear
from engine.core.layers.skinny import BUCKETS, FewRows, SkinnyKernel
from engine.core.layers.tuning_cache import Choice, TuningCache, default_directory, describe_machine

log = logging.getLogger(__name__)

NEEDED_GAIN = 0.99
"""A kernel replaces torch's own if it takes at most this share of its time: less may be noise."""

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias of one layer."""


@frozen(kw_only=True)
class Work:
    """All layers of one shape."""

    few_rows: FewRows
    weights: Sequence[Weights]


class Timer(Protocol):
    """Measures candidates."""

    def prepare(self, wanted: Sequence[tuple[Work, int, Sequence[Tile]]]) -> None:
        """Told in advance of works, rows and tiles that `seconds` will be asked for, so that they compile together."""

    def seconds(self, work: Work, rows: int, tile: Tile | None) -> float:
        """Of one multiplication, with weights that are in no cache; tile None: torch's own. inf: it cannot run."""


@frozen(kw_only=True)
class TuningReport:
    """What `tune` did."""

    choices: tuple[Choice, ...]
    measured: int
    """How many were not on disk."""
    seconds: float


def tune(layers: LayerFactory, directory: str = "", timer: Timer | None = None) -> TuningReport:
    """Set the kernels of all layers that have a choice, by what is on disk or else by measurement.

    layers: fused ones on a GPU, filled. directory: of the cache; empty: `default_directory`.
    """
    from engine.core.layers.timing import GraphTimer

    device = torch.device(layers.device)
    cache = TuningCache(Path(directory) if directory else default_directory(), describe_machine(device))
    report = apply(collect(layers), cache, timer or GraphTimer(device), device)
    for choice in report.choices:
        log.info("%s", choice)
    log.info("kernels for few rows: %d of %d measured", report.measured, len(report.choices))
    return report


def collect(layers: LayerFactory) -> list[Work]:
    """The layers that have a choice, by shape."""
    weights: dict[Problem, list[Weights]] = {}
    tables: dict[Problem, FewRows] = {}

    def note(few_rows: FewRows, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        tables[few_rows.problem] = few_rows
        weights.setdefault(few_rows.problem, []).append((weight, bias))

    for layer in layers.layers:
        if isinstance(layer, Linear) and isinstance(layer.kernel, SkinnyKernel):
            note(layer.kernel.few_rows, layer.weights["weight"], layer.bias)
        elif isinstance(layer, FusedLMHead):
            note(layer.few_rows, layer.weight, None)
            note(layer.few_rows_greedy, layer.weight, None)
    return [Work(few_rows=table, weights=weights[problem]) for problem, table in tables.items()]


def apply(works: Sequence[Work], cache: TuningCache, timer: Timer, device: torch.device) -> TuningReport:
    """Set the kernels of `works`: what the cache lacks is measured and added to it."""
    begin = time.perf_counter()
    known = dict(cache.load())
    missing = [
        (work, rows, candidates(work.few_rows.problem, rows, device))
        for work in works
        for rows in BUCKETS
        if (work.few_rows.problem, rows) not in known
    ]
    if missing:
        timer.prepare(missing)
        for work, rows, tiles in missing:
            known[work.few_rows.problem, rows] = decide(work, rows, tiles, timer)
        cache.store(known)
    chosen = []
    for work in works:
        for rows in BUCKETS:
            chosen.append(known[work.few_rows.problem, rows])
            work.few_rows.choose(rows, chosen[-1].tile)
    return TuningReport(choices=tuple(chosen), measured=len(missing), seconds=time.perf_counter() - begin)


def decide(work: Work, rows: int, tiles: Sequence[Tile], timer: Timer) -> Choice:
    """The fastest tile, then the best number of bytes to fetch in advance with it; torch's own unless they gain."""
    problem = work.few_rows.problem
    baseline = timer.seconds(work, rows, None)
    best: Mapping[float, Tile] = {timer.seconds(work, rows, tile): tile for tile in tiles}
    if best:
        fastest = best[min(best)]
        itemsize = work.weights[0][0].element_size()
        best = {**best, **{timer.seconds(work, rows, tile): tile for tile in with_ahead(fastest, problem, itemsize)}}
    seconds = min(best, default=baseline)
    gains = bool(best) and seconds <= baseline * NEEDED_GAIN
    return Choice(
        problem=problem,
        rows=rows,
        tile=best[seconds] if gains else None,
        seconds=seconds if gains else baseline,
        torch_seconds=baseline,
    )
