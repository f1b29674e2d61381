"""W x^T in W8A8 at 129 to 256 rows (ops/gemm/transposed_matmul.py), compared with the present tiles and torch's kernel.

    python benchmarks/transposed_w8a8.py [--kinds fp8 int8] [--shapes 28672x4096 ...] [--rows 136 192 ...]
        [--gated 28672x4096 ...] [--check] [--seconds 100] [--json FILE]

Microseconds of a layer including the quantization of x, from CUDA graphs with cold weights; all ways in turns, in
random order; medians of the rounds. `old`: the tile that W8A8Matmul uses, with the fastest candidate for 256 rows
(measured here) as the choice of that row class. `best`: the fastest of these candidates at this number of rows. Then
each new tile. --gated: with the activation and the quantization of its result; new tiles activate in the epilogue.
--blocks: of models, old and new in turns. --check: compare with float64, int8 also with the bits of the present tiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from w8a8_rows import MODELS, Chain

from engine.core.autotune import GraphTimer, TuningCache, collect_tasks, describe_machine, tune_tasks
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.common.launch import num_sms
from engine.ops.gemm import transposed_launch
from engine.ops.gemm.scaled_matmul import W8A8Tile, compile_matmul, matmul
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.transposed_launch import TransposedTile
from engine.plugins.quant import w8a8_shape
from engine.plugins.quant.w8a8_matmul import W8A8Matmul
from engine.plugins.quant.w8a8_tiles import ONE_WAVE_ROWS, PERSISTENT_CLASS, TRANSPOSED_TILES, one_wave_tile

DEVICE = torch.device("cuda", 0)
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SHAPES = (
    "28672x4096", "7808x41216", "4096x14336", "51200x5120", "5120x17408", "6144x4096", "4096x4096", "5120x5120",
    "2048x6144", "8192x28672", "34816x5120", "7168x5120",
)  # fmt: skip
ROWS = (192, 150, 256, 136, 224, 160)
POOL_BYTES = 700_000_000
COLD_BYTES = 150_000_000
MAX_COPIES = 24
REPLAYS = 7


def new_tiles(rows: int) -> list[TransposedTile]:
    """The tiles to measure."""
    return list(TRANSPOSED_TILES[PERSISTENT_CLASS if rows in ONE_WAVE_ROWS else 256])


def present_tiles(codes: W8A8Matmul) -> list[Any]:
    """The other candidates for 256 rows. None: torch's kernel."""
    return [tile for tile in codes.shape.candidates(256) if not isinstance(tile, TransposedTile)]


def old_tile(rows: int, outputs: int, choice: Any) -> Any:
    """The tile without a row class of 192. choice: that of the row class of 256."""
    one_wave = one_wave_tile(outputs, num_sms(DEVICE)) if rows in ONE_WAVE_ROWS else None
    return one_wave or choice


class Bench:
    """Operands and graphs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.dtype = KINDS[kind]
        self.workspace = Workspace(DEVICE)
        if kind == "int8":
            self.pool = torch.randint(-127, 128, (POOL_BYTES,), dtype=torch.int8, device=DEVICE)
        else:
            self.pool = torch.empty(POOL_BYTES, dtype=self.dtype, device=DEVICE)
            for part in self.pool.chunk(16):
                part.copy_(torch.randn(part.shape, device=DEVICE))
        self.stream = torch.cuda.Stream(DEVICE)
        # Keeps alive the memory pool that all graphs allocate from.
        self.first = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self.first.capture_begin()
            torch.zeros(1, device=DEVICE)
            self.first.capture_end()

    def weights(self, outputs: int, inputs: int) -> list[torch.Tensor]:
        """Different weights in the pool, enough to be cold."""
        size = outputs * inputs
        count = max(2, min(MAX_COPIES, -(-COLD_BYTES // size)))
        step = min(size, (POOL_BYTES - size) // (count - 1)) // 1024 * 1024
        return [self.pool[n * step : n * step + size].view(outputs, inputs) for n in range(count)]

    def capture(self, calls: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            calls()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.first.pool())
            calls()
            graph.capture_end()
            graph.replay()
        self.stream.synchronize()
        return graph

    def times(self, ways: Mapping[Any, Callable[[], Any]], count: int) -> dict[Any, float]:
        """Microseconds per layer."""
        graphs = {name: self.capture(calls) for name, calls in ways.items()}
        found: dict[Any, list[float]] = {name: [] for name in graphs}
        with torch.cuda.stream(self.stream):
            for _ in range(REPLAYS):
                events = []
                for name in random.sample(list(graphs), len(graphs)):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graphs[name].replay()
                    end.record()
                    events.append((name, begin, end))
                self.stream.synchronize()
                for name, begin, end in events:
                    found[name].append(begin.elapsed_time(end) * 1000 / count)
        for graph in graphs.values():
            graph.reset()
        return {name: statistics.median(one) for name, one in found.items()}

    def transposed(self, quantized: Any, weight: Any, scale: Any, tile: Any, activation: Any = None) -> torch.Tensor:
        outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
        out = torch.empty((quantized[0].shape[0], outputs), dtype=torch.bfloat16, device=DEVICE)
        operands = ScaledOperands(*quantized, weight, scale, None)
        transposed_launch.launch(out, operands, tile, self.workspace, activation=activation)
        return out

    def measure(self, shape: str, rows: Sequence[int], choices: dict[str, Any]) -> dict[int, dict[str, float]]:
        outputs, inputs = map(int, shape.split("x"))
        codes = W8A8Matmul(self.workspace, self.dtype, outputs, inputs, torch.bfloat16)
        layers = self.weights(outputs, inputs)
        scale = torch.rand(outputs, device=DEVICE) / inputs
        given = {count: torch.randn(count, inputs, device=DEVICE).bfloat16() for count in {*rows, 256}}

        def old_way(tile: Any, x: torch.Tensor) -> Callable[[], Any]:
            return lambda: [codes.multiply(x, {"weight": one, "scale": scale}, None, tile) for one in layers]

        def new_way(tile: Any, x: torch.Tensor) -> Callable[[], Any]:
            return lambda: [self.transposed(quantize_rows(x, self.dtype), one, scale, tile) for one in layers]

        if shape not in choices:
            by_tile = self.times({tile: old_way(tile, given[256]) for tile in present_tiles(codes)}, len(layers))
            choices[shape] = min(by_tile, key=by_tile.__getitem__)
        codes.choose(256, choices[shape])
        found = {}
        for count in rows:
            x = given[count]
            old = old_tile(count, outputs, choices[shape])
            tiles = new_tiles(count)
            ways = {("old", tile): old_way(tile, x) for tile in dict.fromkeys([*present_tiles(codes), old])}
            times = self.times(ways | {("new", tile): new_way(tile, x) for tile in tiles}, len(layers))
            olds = {tile: us for (kind, tile), us in times.items() if kind == "old"}
            best = min(olds, key=olds.__getitem__)
            found[count] = {"old": olds[old], "best": olds[best]} | {
                short(tile): us for (kind, tile), us in times.items() if kind == "new"
            }
            self.report(f"{shape} {count}", found[count], f"{old} | {best}")
        return found

    def measure_gated(self, shape: str, rows: Sequence[int], choices: dict[str, Any]) -> dict[int, dict[str, float]]:
        outputs, inputs = map(int, shape.split("x"))
        codes = W8A8Matmul(self.workspace, self.dtype, outputs, inputs, torch.bfloat16)
        layers = self.weights(outputs, inputs)
        scale = torch.rand(outputs, device=DEVICE) / inputs
        if shape not in choices:
            self.measure(shape, rows[:1], choices)
        codes.choose(256, choices[shape])
        found = {}
        for count in rows:
            x = torch.randn(count, inputs, device=DEVICE).bfloat16()

            def separate(tile: Any, x: torch.Tensor = x) -> Callable[[], Any]:
                def run() -> None:
                    for one in layers:
                        y = codes.multiply(x, {"weight": one, "scale": scale}, None, tile)
                        act_and_mul_quantize(y, self.dtype, "silu")

                return run

            def separate_new(tile: Any, x: torch.Tensor = x) -> Callable[[], Any]:
                def run() -> None:
                    for one in layers:
                        y = self.transposed(quantize_rows(x, self.dtype), one, scale, tile)
                        act_and_mul_quantize(y, self.dtype, "silu")

                return run

            def fused(tile: Any, x: torch.Tensor = x) -> Callable[[], Any]:
                def run() -> None:
                    for one in layers:
                        y = self.transposed(quantize_rows(x, self.dtype), one, scale, tile, "silu")
                        quantize_rows(y, self.dtype)

                return run

            old = old_tile(count, outputs, choices[shape])
            ways: dict[Any, Any] = {"old": separate(old)}
            for tile in new_tiles(count):
                ways[f"{short(tile)} separate"] = separate_new(tile)
                ways[f"{short(tile)} gated"] = fused(tile)
            found[count] = self.times(ways, len(layers))
            self.report(f"gated {shape} {count}", found[count], str(old))
        return found

    def report(self, case: str, times: Mapping[str, float], more: str) -> None:
        line = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"{self.kind} {case}: {line}  [{more}]", flush=True)

    def compile(self, rows: Sequence[int], activations: Sequence[Any], bias: torch.Tensor | None = None) -> None:
        """Begin to compile the new tiles."""
        weight = self.pool[: 4096 * 2048].view(4096, 2048)
        scale = torch.ones(4096, device=DEVICE)
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for count in rows:
                x, x_scale = quantize_rows(torch.randn(count, 2048, device=DEVICE).bfloat16(), self.dtype)
                for activation in activations:
                    out = torch.empty(count, 4096 if activation is None else 2048, dtype=torch.bfloat16, device=DEVICE)
                    for tile in new_tiles(count):
                        operands = ScaledOperands(x, x_scale, weight, scale, bias)
                        transposed_launch.launch(
                            out, operands, tile, self.workspace, activation=activation, compile_only=True
                        )
                codes = W8A8Matmul(self.workspace, self.dtype, 4096, 4096, torch.bfloat16)
                for other in present_tiles(codes):
                    if isinstance(other, W8A8Tile):
                        compile_matmul(x, x_scale, weight, scale, bias, torch.bfloat16, other, self.workspace)

    def check(self) -> None:
        """Compare with float64; int8 with the bits of the present tiles; repeat."""
        for outputs, inputs in ((4752, 5120), (7168, 4096), (1040, 4224), (17424, 1152), (51200, 1024)):
            for count in (129, 192, 250):
                weight = self.weights(outputs, inputs)[0]
                scale = torch.rand(outputs, device=DEVICE) / inputs
                bias = torch.randn(outputs, device=DEVICE).bfloat16() if count == 129 else None
                x, x_scale = quantize_rows(torch.randn(count, inputs, device=DEVICE).bfloat16(), self.dtype)
                exact = (x.double() @ weight.double().t()) * x_scale.double()[:, None] * scale.double()
                if bias is not None:
                    exact += bias.double()
                codes = W8A8Matmul(self.workspace, self.dtype, outputs, inputs, torch.bfloat16)
                tile = next(one for one in present_tiles(codes) if isinstance(one, W8A8Tile) and one.persistent)
                present = matmul(x, x_scale, weight, scale, bias, torch.bfloat16, tile, self.workspace)
                gated = act_and_mul(present, "silu")
                for new in new_tiles(count):
                    name = f"{self.kind} {outputs}x{inputs} {count} {new}"
                    got = torch.full((count, outputs), torch.nan, dtype=torch.bfloat16, device=DEVICE)
                    given = (ScaledOperands(x, x_scale, weight, scale, bias), new, self.workspace)
                    transposed_launch.launch(got, *given)
                    error = float((got.double() - exact).norm() / exact.norm())
                    usual = float((present.double() - exact).norm() / exact.norm())
                    same = torch.equal(got, present)
                    again = torch.empty_like(got)
                    repeats = True
                    for _ in range(5):
                        transposed_launch.launch(again, *given)
                        repeats &= torch.equal(again, got)
                    clean = not self.workspace.arrivals.any() and bool((self.workspace.polled_sums == -1).all())
                    activated = torch.full((count, outputs // 2), torch.nan, dtype=torch.bfloat16, device=DEVICE)
                    transposed_launch.launch(activated, *given, activation="silu")
                    close = float((activated.double() - gated.double()).norm() / gated.double().norm())
                    equal = torch.equal(activated, gated)
                    good = error < 2 * usual + 1e-3 and repeats and clean and close < 4e-3
                    good &= self.kind == "fp8" or (same and equal)
                    print(
                        f"{'ok  ' if good else 'FAIL'} {name}: error {error:.1e} (present {usual:.1e}),"
                        f" same bits {same}, repeats {repeats}, clean {clean}, gated {close:.1e} equal {equal}",
                        flush=True,
                    )


def tuned(chain: Chain, timer: GraphTimer, new: Mapping[int, Any]) -> list[dict[int, Any]]:
    """What the layers of a chain choose for the row classes of 192 and 256. new: candidates that W8A8Matmul adds."""
    w8a8_shape.TRANSPOSED_TILES = dict(new)
    tasks = [task for task in collect_tasks(chain.layers) if task.rows in (PERSISTENT_CLASS, 256)]
    with tempfile.TemporaryDirectory() as directory:
        tune_tasks(tasks, TuningCache(Path(directory), describe_machine(DEVICE)), timer)
    return [dict(one._chosen) for one in matmuls_of(chain)]


def matmuls_of(chain: Chain) -> list[W8A8Matmul]:
    """The products of a chain."""
    return [part.kernel._w8a8 for block in chain.blocks for part in block if hasattr(part, "kernel")]


def measure_blocks(model: str, bench: Bench, rows: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Microseconds per block without and with the new tiles and the row class of 192."""
    timer = GraphTimer(DEVICE)
    print(f"{bench.kind} block of {model}", flush=True)
    chain = Chain(MODELS[model], bench.kind, 1, timer, ())
    matmuls = matmuls_of(chain)
    before, after = tuned(chain, timer, {}), tuned(chain, timer, TRANSPOSED_TILES)
    for one, old, new in list(zip(matmuls, before, after, strict=True))[:4]:
        print(f"  {one.outputs}x{one.inputs}: 256 rows: {old[256]} -> {new[256]}; 192: {new.get(PERSISTENT_CLASS)}")
    times: dict[tuple[int, str], list[float]] = {(count, way): [] for count in rows for way in ("old", "new")}
    sizes = (chain.hidden, chain.hidden, chain.attention)
    inputs = {count: [torch.randn(count, size, device=DEVICE).bfloat16() for size in sizes] for count in rows}
    for _ in range(rounds):
        for count, way in random.sample(list(times), len(times)):
            for one, old, new in zip(matmuls, before, after, strict=True):
                one._chosen = dict(new) if way == "new" else {PERSISTENT_CLASS: old[256], 256: old[256]}
            x, residual, attention = inputs[count]
            seconds = timer.replayed(
                lambda given=(x, residual, attention): chain.run(given[0], given[1].clone(), given[2])
            )
            times[count, way].append(seconds / len(chain.blocks) * 1e6)
    found = {count: {way: statistics.median(times[count, way]) for way in ("old", "new")} for count in rows}
    for count, one_case in found.items():
        bench.report(f"block {model} {count}", one_case, "")
    return found


def short(tile: TransposedTile) -> str:
    """A column's name."""
    return f"{tile.weight_rows} of W"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--gated", nargs="*", default=[])
    parser.add_argument("--blocks", nargs="*", default=[], help="models whose blocks are measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(DEVICE)}

    def done() -> bool:
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
        return time.monotonic() - begin > arguments.seconds

    with torch.inference_mode():
        benches = {kind: Bench(kind) for kind in arguments.kinds}
        for bench in benches.values():
            bench.compile(sorted({192 if rows <= 192 else 256 for rows in arguments.rows}), [None, "silu"])
            if arguments.check:
                bench.compile([192], [None, "silu"], torch.zeros(4096, device=DEVICE).bfloat16())
        print(f"operands after {time.monotonic() - begin:.0f} s", flush=True)
        if arguments.check:
            for bench in benches.values():
                bench.check()
            print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
        choices: dict[str, dict[str, Any]] = {kind: {} for kind in benches}
        for number, rows in enumerate((arguments.rows[:2], arguments.rows[2:])):
            for shape in arguments.shapes:
                for kind, bench in benches.items():
                    if not done() and rows:
                        found.setdefault(f"{kind} {shape}", {}).update(bench.measure(shape, rows, choices[kind]))
            if number == 0:
                for shape in arguments.gated:
                    for kind, bench in benches.items():
                        if not done():
                            gated = [rows for rows in arguments.rows if rows in (150, 192, 256)]
                            found[f"gated {kind} {shape}"] = bench.measure_gated(shape, gated, choices[kind])
                for model in arguments.blocks:
                    for kind, bench in benches.items():
                        if not done():
                            rounds = arguments.rounds
                            found[f"block {kind} {model}"] = measure_blocks(model, bench, arguments.rows, rounds)
    done()
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
