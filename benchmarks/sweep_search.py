"""Full searches of near_sweep.py: every candidate that the engine has, at the very rows and shape of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from sweep_cases import LinearCase, LinearShape
from sweep_linears import Layer, LinearSweep
from sweep_timing import Call, runs

from engine.core.compilation import CompilingElsewhere
from engine.core.layers import SkinnyGemm
from engine.ops.common.launch import has_wgmma, num_sms
from engine.ops.gemm.persistent_tile import SIZES, PersistentTile
from engine.plugins.quant.w8a8_tiles import ONE_WAVE_TILES, split_tiles
from engine.plugins.quant.w8a8_tuning import W8A8Op
from engine.plugins.quant.w8a8_waves import TIMES
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

MAX_PERSISTENT_WAVES = 12
"""Persistent tiles with more waves than this are left out."""
FINALISTS = 3
"""Candidates that are timed again, in turns, after the first timing of all."""
ROUNDS = 3
Seconds = Callable[[Sequence[Call]], float]
"""Times calls that follow one another: seconds of one."""


class LayerSearch:
    """Times every candidate of a layer's product."""

    def __init__(self, layer: Layer, rows: int) -> None:
        self.rows = rows
        self._layer = layer
        self._calls = list(layer.autotuned_calls())
        self._ops = [call for call in self._calls if self._is_used(call.op)]
        self.op = self._ops[0].op
        self._times: dict[Any, float] = {}
        """Seconds by each candidate, without refinements."""

    def _is_used(self, op: Any) -> bool:
        """Whether the op multiplies this many rows."""
        kernel = self._layer.linear.kernel
        few = getattr(kernel, "w8a16_max_rows", None)
        if few is None or len({type(call.op) for call in self._calls}) == 1:
            return True
        return isinstance(op, W8A8Op) == (self.rows > few)

    @property
    def row_class(self) -> int:
        """The row class that the rows belong to."""
        classes = self.op.row_classes
        return next((one for one in classes if one >= self.rows), classes[-1])

    def candidates(self) -> list[Any]:
        """All candidates of the row class, and tiles that a rule may choose for other rows of the class."""
        op, rows = self.op, self.rows
        found = list(op.candidates(self.row_class))
        sms = num_sms(torch.device(self._layer.linear.spec.device))
        if isinstance(op, W8A8Op) and op._matmul.shape.persistent:
            outputs = op._matmul.outputs
            for tile in (*ONE_WAVE_TILES, *TIMES):
                if tile.programs(rows, outputs) <= MAX_PERSISTENT_WAVES * sms:
                    found += [tile, *split_tiles(tile, rows, outputs, op.inputs, sms)]
        elif isinstance(op, WeightOnlyOp) and PersistentTile.supports(op.shape) and has_wgmma(op._matmul.device):
            for size in SIZES:
                splits = (evolve(size, splits=count) for count in (2, 4, 8))
                fitting = [one for one in splits if one.can_split(op.shape.weight_rows, op.shape.blocks, rows, sms)]
                if size.columns < max(2 * rows, 128):
                    found += [size, *fitting]
        return list(dict.fromkeys(found))

    def compile(self, candidates: Iterable[Any]) -> None:
        """Begin to compile candidates in other processes; on a CPU, the interpreter runs them."""
        if torch.device(self._layer.linear.spec.device).type == "cpu":
            return
        with CompilingElsewhere():
            for one in candidates:
                self.op.compile(self.rows, one, self._ops[0].operands)

    def calls_by(self, candidate: Any) -> Sequence[Call]:
        """The norm and the product by a candidate, one call per copy of the weights, without a separate activation."""
        x = self._layer.random_input(self.rows)
        norm, op = self._layer.norm, self.op
        return [lambda one=one: op.run(candidate, norm(x)[0], one.operands) for one in self._ops]

    def measure(self, seconds: Seconds) -> None:
        """Time all candidates, and begin to compile the refinements of the fastest."""
        self._times = self._time(self.candidates(), seconds)
        self.compile(self._refinements())

    def search(self, seconds: Seconds) -> dict[Any, float]:
        """Candidate that runs -> seconds, fastest first, with refinements of the fastest.

        Raises RuntimeError if there is none.
        """
        if not self._times:
            self.measure(seconds)
        times = self._times | self._time(self._refinements(), seconds)
        if not times:
            raise RuntimeError(f"no candidate for {self.rows} rows of {self.op.key} runs")
        finalists = sorted(times, key=lambda one: times[one])[:FINALISTS]
        for _ in range(ROUNDS - 1):
            for one in finalists:
                times[one] = min(times[one], seconds(self.calls_by(one)))
        return dict(sorted(times.items(), key=lambda pair: pair[1]))

    def _refinements(self) -> list[Any]:
        ranked = sorted(self._times, key=lambda one: self._times[one])
        return [one for one in self.op.refine(self.row_class, ranked) if one not in self._times]

    def _time(self, candidates: Iterable[Any], seconds: Seconds) -> dict[Any, float]:
        made = {one: self.calls_by(one) for one in candidates}
        return {one: seconds(calls) for one, calls in made.items() if runs(calls[0])}

    def use(self, candidate: Any) -> None:
        """Have the layer multiply this many rows by a candidate."""
        op, rows = self.op, self.rows
        if isinstance(op, SkinnyGemm):
            op.launches[rows] = None if candidate is None else op.make(rows, candidate)
            return
        matmul: Any = op._matmul  # type: ignore[attr-defined]
        former = matmul.tile
        if isinstance(op, W8A8Op):
            matmul.tile = lambda count: candidate if count == rows else former(count)
            return
        shape = op.shape  # type: ignore[attr-defined]
        matmul.tile = lambda one, count: candidate if (one, count) == (shape, rows) else former(one, count)
        matmul._tiles.clear()

    @property
    def chosen(self) -> Any:
        """The candidate that the layer uses at present."""
        op = self.op
        if isinstance(op, SkinnyGemm):
            launch = op.launches[self.rows]
            return None if launch is None else launch.tile
        matmul: Any = op._matmul  # type: ignore[attr-defined]
        return matmul.tile(self.rows) if isinstance(op, W8A8Op) else matmul.tile(op.shape, self.rows)  # type: ignore[attr-defined]


class SearchedLinears(LinearSweep):
    """The layers of neighbours of one kind, each by the fastest of all candidates at its rows."""

    _searches: Mapping[tuple[LinearShape, int], LayerSearch] = {}

    def begin(self) -> None:
        """Begin to compile."""
        self._searches = {
            (shape, count): LayerSearch(self.layers[shape], count)
            for shape, rows in self.rows.items()
            for count in sorted(rows)
            if next(self.layers[shape].autotuned_calls(), None) is not None
        }
        for search in self._searches.values():
            search.compile(search.candidates())

    def tune(self) -> str:
        """Search. Returns what was chosen."""
        if not self._searches:
            self.begin()
        for search in self._searches.values():
            search.measure(self._timer.per_call)
        lines = []
        for (shape, rows), search in self._searches.items():
            times = search.search(self._timer.per_call)
            best = next(iter(times))
            search.use(best)
            lines.append(f"    {shape}, {rows} rows: {search.op.name(best)}, of {len(times)}")
        return "\n".join(lines)


def compile_row_classes(sweep: LinearSweep) -> None:
    """Begin to compile what a LinearSweep measures when it tunes its row classes."""
    with CompilingElsewhere():
        for shape, rows in sweep.rows.items():
            for task in sweep.layers[shape].wanted_tasks(rows):
                for one in task.op.candidates(task.rows):
                    task.op.compile(task.rows, one, task.operands[0])


def case_search(sweep: LinearSweep, case: LinearCase) -> LayerSearch | None:
    """The search of a case's own layer. None: there is one way to multiply."""
    layer = sweep.layers[case.shape]
    return None if next(layer.autotuned_calls(), None) is None else LayerSearch(layer, case.rows)
