"""Linear layers of shape_sweep.py: made by the engine's layer factory, tuned as at start-up, and timed after a norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from models import W4A16
from sweep_cases import LinearCase, LinearShape
from sweep_timing import Call, SweepTimer, run_in_threads, runs

from engine.core.autotune import AutotunedCall, TuningTask, group_calls, measure, pick_fastest
from engine.core.layers import LayerFactory, Linear, RMSNorm
from engine.core.plugin_host import load_plugins
from engine.core.weights import DummySource, load_weights
from engine.ops.common.launch import has_wgmma, num_sms, shared_memory
from engine.ops.gemm.few_rows_tile import FewRowsTile, few_rows_tile, supports_few_rows
from engine.ops.gemm.weight_only_tiles import (
    FINE_TILE,
    FINEST_TILE,
    LARGE_TILE,
    PREFETCHED_BLOCKS,
    PROGRAMS_PER_SM,
    PROGRAMS_PER_SM_OF_FINEST_TILE,
    PROGRAMS_PER_SM_OF_SMALL_WEIGHTS,
    SMALL_TILE,
    UNMEASURED_MAX_ROWS,
    WARP_PAIRS,
    WEIGHT_ONLY_MAX_ROWS,
    PersistentTile,
    WeightOnlyShape,
    WeightOnlyTile,
    WeightOnlyVectorTile,
    default_tile,
    with_even_splits,
    with_splits,
)
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

METHODS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    "fp8": ("fp8", None),
    "int8": ("int8", None),
    "4bit": ("compressed-tensors", W4A16),
}
"""Kind -> name of the quantization plugin, and quantization_config of the checkpoint."""
COLD_BYTES = 160e6
"""Bytes of weights that are read before any are read again: three L2 caches of an H200."""
MAX_COPIES = 128
W8_FINE_TILES = (
    (FINE_TILE, PROGRAMS_PER_SM),
    (FINE_TILE, PROGRAMS_PER_SM + 1),
    (FINEST_TILE, PROGRAMS_PER_SM_OF_FINEST_TILE),
)
GROUPED_FINE_TILES = ((FINE_TILE, PROGRAMS_PER_SM_OF_SMALL_WEIGHTS), (FINE_TILE, PROGRAMS_PER_SM))
"""(tile, maximum programs per multiprocessor) for 2 to UNMEASURED_MAX_ROWS rows, of W8 and of grouped layouts."""
VECTORS = ((2, 1), (2, 2), (4, 1), (4, 2))
"""(rows of W, warps) of the weight-only vector tiles."""

Tile = WeightOnlyTile | WeightOnlyVectorTile | FewRowsTile | PersistentTile | None


@frozen(kw_only=True, eq=False)
class Layer:
    """A linear layer with the norm before it, and copies of its weights."""

    norm: RMSNorm
    linear: Linear
    copies: Sequence[Mapping[str, torch.Tensor]]

    def calls(self, rows: int) -> Sequence[Call]:
        """The norm and the product, as in a forward pass of this many rows, one call per copy of the weights.

        A gated layer activates where its kernel does; the kernel of the next layer does otherwise.
        """
        multiply = self.linear.gated if self._activates(rows) else self.linear
        x = self.random_input(rows)

        def call(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
            self.linear.weights = weights
            return multiply(self.norm.quantized_for(self.linear, x)[0])

        return [lambda weights=weights: call(weights) for weights in self.copies]

    def _activates(self, rows: int) -> bool:
        return self.linear.spec.gated and self.linear.kernel.fuses_gating(rows)

    def random_input(self, rows: int) -> torch.Tensor:
        """Random activations."""
        return torch.randn(rows, self.linear.spec.in_features, device=self.linear.spec.device).to(
            getattr(torch, self.linear.spec.dtype)
        )

    def autotuned_calls(self) -> Iterator[AutotunedCall]:
        """What the engine tunes of the layer, once for each copy."""
        for weights in self.copies:
            yield from self.linear.kernel.autotuned_calls(weights, None)

    def wanted_tasks(self, rows: Iterable[int]) -> list[TuningTask]:
        """The tuning tasks whose results the engine uses for these numbers of rows."""
        tasks = group_calls(self.autotuned_calls())
        rows = [count for count in rows if count > UNMEASURED_MAX_ROWS or not _is_ruled(tasks)]
        wanted = {next((task.rows for task in tasks if task.rows >= count), None) for count in rows}
        return [task for task in tasks if task.rows in wanted]

    def error(self, rows: int) -> float:
        """Relative error of the product next to one by the library, with dequantized weights. 0: there is none."""
        call = next(self.autotuned_calls(), None)
        if call is None:
            return 0.0
        x = self.random_input(rows)
        self.linear.weights = self.copies[0]
        normed = self.norm(x)[0]
        product = self.linear.gated if self.linear.spec.gated else self.linear
        exact = call.op.run(None, normed, call.operands).float()
        found = product(self.norm.quantized_for(self.linear, x)[0]).float()
        return float((found - exact).norm() / exact.norm())

    def rule_candidates(self, rows: int) -> list[Tile]:
        """Tiles of which a rule chooses one for this many rows, the chosen first. Empty: the choice was measured."""
        call = next(self.autotuned_calls(), None)
        if call is None or not isinstance(call.op, WeightOnlyOp):
            return []
        if rows <= UNMEASURED_MAX_ROWS:
            return few_row_tiles(call.op.shape, rows, torch.device(self.linear.spec.device))
        if rows > WEIGHT_ONLY_MAX_ROWS and list(call.op.row_classes)[-1:] == [WEIGHT_ONLY_MAX_ROWS]:
            tiles = [tile for tile in call.op.candidates(WEIGHT_ONLY_MAX_ROWS) if tile is not None]
            return [None, *dict.fromkeys(evolve(tile, splits=1) for tile in tiles)]
        return []

    def calls_by(self, tile: Tile, rows: int) -> Sequence[Call]:
        """As `calls`, by a given tile of the weight-only kernel."""
        x = self.random_input(rows)
        ops = [call for call in self.autotuned_calls() if isinstance(call.op, WeightOnlyOp)]
        return [lambda one=one: one.op.run(tile, self.norm(x)[0], one.operands) for one in ops]


def _is_ruled(tasks: Sequence[TuningTask]) -> bool:
    """Whether up to UNMEASURED_MAX_ROWS rows a rule chooses."""
    return any(isinstance(task.op, WeightOnlyOp) for task in tasks)


def few_row_tiles(shape: WeightOnlyShape, rows: int, device: torch.device) -> list[Tile]:
    """Every outcome of weight_only_tiles.default_tile for few rows, the one for this shape first."""
    sms, shared = num_sms(device), shared_memory(device)
    found: list[Tile] = [default_tile(shape, rows, sms, shared, wgmma=has_wgmma(device))]
    if has_wgmma(device) and supports_few_rows(shape, rows):
        found.append(few_rows_tile(shape, sms))
    if rows == 1 and shape.inputs % 2 == 0:
        for tile_rows, warps in VECTORS:
            blocks = WARP_PAIRS * warps * 2 // shape.layout.span
            found.append(WeightOnlyVectorTile(rows=tile_rows, blocks=blocks, warps=warps))
    for tile in (SMALL_TILE, LARGE_TILE):
        fitting = evolve(tile, step=min(tile.step, shape.layout.block))
        if fitting.shared_memory(shape.layout) <= shared:
            found += [fitting, with_splits(fitting, shape, rows, sms)]
    is_w8 = shape.layout.scale_layout != "groups"
    for fine, most in W8_FINE_TILES if is_w8 else GROUPED_FINE_TILES:
        fitting = evolve(fine, step=min(fine.step, shape.layout.block))
        if rows > 1 and fitting.shared_memory(shape.layout) <= shared:
            split = with_even_splits(fitting, shape, rows, most * sms)
            found += [split] if is_w8 else [split, evolve(split, ahead=PREFETCHED_BLOCKS[shape.layout.bits])]
    return list(dict.fromkeys(found))


class LinearSweep:
    """The layers of all cases of one kind."""

    def __init__(self, kind: str, device: str, dtype: str, timer: SweepTimer, cases: Iterable[LinearCase]) -> None:
        self._kind = kind
        self._timer = timer
        self.rows: dict[LinearShape, set[int]] = {}
        for case in cases:
            self.rows.setdefault(case.shape, set()).add(case.rows)
        self.layers = self._make(device, dtype)
        """By shape; `rows` are the numbers of rows that each multiplies."""

    def _make(self, device: str, dtype: str) -> dict[LinearShape, Layer]:
        method = None
        if self._kind in METHODS:
            name, checkpoint = METHODS[self._kind]
            method = load_plugins().quant.get(name).load().from_checkpoint(checkpoint, None)
        factory = LayerFactory(dtype=dtype, device=device, quant=method, fused=True)
        made = {shape: _make_layer(factory, f"layer{number}", shape) for number, shape in enumerate(self.rows)}
        load_weights(factory, DummySource())
        return {
            shape: Layer(norm=norm, linear=linear, copies=_copies(linear)) for shape, (norm, linear) in made.items()
        }

    def tune(self) -> str:
        """Choose the kernels as the engine does at its start, without its cache. Returns what was chosen."""
        self.compile()
        tasks = [task for shape, rows in self.rows.items() for task in self.layers[shape].wanted_tasks(rows)]
        results = []
        for task, timings in zip(tasks, measure(tasks, self._timer), strict=True):
            candidate, result = pick_fastest(task, timings)
            task.choose(candidate)
            results.append(f"    {result}, of {len(timings)}")
        self.compile()
        return "\n".join(results)

    def compile(self) -> None:
        """Make each call that will be measured once, in threads, since compiling takes most of the time."""
        run_in_threads([self.layers[shape].calls(count)[0] for shape, rows in self.rows.items() for count in rows])

    def seconds(self, case: LinearCase) -> float:
        """Seconds of the norm and the product."""
        return self._timer.per_call(self.layers[case.shape].calls(case.rows))

    def error(self, case: LinearCase) -> float:
        return self.layers[case.shape].error(case.rows)

    def choices(self, case: LinearCase) -> Mapping[str, float]:
        """Seconds by each tile that the rule for the case could have chosen, the chosen first. Empty: measured."""
        layer = self.layers[case.shape]
        tiles = layer.rule_candidates(case.rows)
        ways: dict[str, Sequence[Call]] = {str(tile or "library"): layer.calls_by(tile, case.rows) for tile in tiles}
        run_in_threads([calls[0] for calls in ways.values()])
        return {name: self._timer.per_call(calls) for name, calls in ways.items() if runs(calls[0])}


def _make_layer(factory: LayerFactory, name: str, shape: LinearShape) -> tuple[RMSNorm, Linear]:
    """A norm and a linear layer of a shape."""
    parts = [(f"{name}.gate", shape.outputs // 2), (f"{name}.up", shape.outputs // 2)]
    linear = factory.linear(parts if shape.gated else [(name, shape.outputs)], shape.inputs, gated=shape.gated)
    return factory.norm(f"{name}.norm", shape.inputs, 1e-5), linear


def _copies(linear: Linear) -> list[Mapping[str, torch.Tensor]]:
    """The layer's weights and copies of them, which together exceed the GPU's L2 cache."""
    on_gpu = torch.device(linear.spec.device).type == "cuda"
    more = min(max(int(COLD_BYTES / linear.nbytes), 1), MAX_COPIES - 1) if on_gpu else 1
    duplicates = ({name: tensor.clone() for name, tensor in linear.weights.items()} for _ in range(more))
    return [linear.weights, *duplicates]
