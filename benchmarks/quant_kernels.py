"""Quantized linear layers, one at a time: microseconds replayed from a CUDA graph, compared with bfloat16.

    python benchmarks/quant_kernels.py [--tune] [--kinds fp8 int8 4bit ...] [--rows 1 16 ...] [--json FILE]

Shapes are those of Llama-3.1-8B. Weights rotate over more memory than the L2 cache holds. Each layer is timed after the
norm that makes its input, with the quantization of activations as a separate kernel (layer_kernels.py times the fused
ones), and SiLU * up for gate and up. Floor: bytes of weights and scales over 4.2 TB/s. `bf16` is cuBLAS with plain
weights, `engine` what the engine launches after autotuning, `table` what it launches without. --tune: also print the
tuning results, and time more tiles and libraries than the engine's candidates; the best are printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import torch
import torch.nn.functional as F
import triton
from attrs import evolve, frozen
from triton.runtime.errors import OutOfResources

from engine.cli.bench.report import Row, report, write
from engine.core.autotune import (
    AutotunedCall,
    GraphTimer,
    Operands,
    group_calls,
    measure as measure_tasks,
    pick_fastest,
)
from engine.core.quant import LinearPart, LinearSpec
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.common.launch import shared_memory
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix, W8Layout
from engine.ops.gemm.scaled_matmul import W8A8Tile, matmul
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    COLUMNS,
    WEIGHT_ONLY_MAX_ROWS,
    WeightOnlyShape,
    WeightOnlyTile,
    fits_workspace,
    with_splits,
)
from engine.ops.norm.rms_norm import add_rms_norm
from engine.plugins.quant.w8_gpu import W8GpuKernel
from engine.plugins.quant.w8_kernel import W8Format
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

BANDWIDTH = 4.2e12
DEVICE = torch.device("cuda", 0)
COLD_BYTES = 150e6
"""Bytes of weights that one replay reads: three L2 caches of an H200."""
MAX_COPIES = 16
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 2048)
LINEARS = models.LINEARS["llama-3.1-8b"]
W8_KINDS = {"fp8": ("float8_e4m3fn", "channel"), "block": ("float8_e4m3fn", "block"), "int8": ("int8", "channel")}
GROUPED = {"4bit": (4, 128, False), "4bit-zeros": (4, 128, True), "8bit": (8, 128, False)}
"""(bits, inputs per group, zero points)."""
FEW_SHAPES = ((32, 2), (64, 4), (64, 2), (128, 4))
"""(rows of W, warps) of the tiles that --tune tries, for up to FEW_COLUMNS rows of x."""
FEW_COLUMNS, EITHER_ORDER = 32, 64
"""Up to FEW_COLUMNS rows of x sums are scaled, for EITHER_ORDER rows sums or weights, with more rows weights."""
MANY_SHAPES = {
    64: (
        (64, 64, 4, 3, 256), (64, 64, 4, 4, 128), (128, 64, 4, 3, 128), (128, 64, 4, 4, 128), (128, 64, 8, 3, 256),
        (128, 64, 8, 3, 128), (128, 64, 8, 4, 128), (256, 64, 8, 4, 128), (256, 64, 16, 4, 128),
    ),
    128: (
        (64, 128, 4, 3, 128), (128, 128, 8, 3, 256), (128, 128, 8, 3, 128), (128, 128, 8, 4, 128), (128, 64, 8, 4, 128),
        (256, 128, 8, 3, 128), (256, 128, 8, 4, 128), (256, 128, 16, 3, 128), (256, 128, 16, 4, 128),
    ),
}  # fmt: skip
"""(rows of W, rows of x, warps, stages, inputs per loop iteration), by maximum rows of x."""
MATMULS = [
    W8A8Tile(rows=rows, outputs=outputs, warps=warps, stages=stages, block_k=block_k)
    for rows, outputs, block_k, warps, stages in (
        (64, 32, 128, 4, 6), (64, 64, 128, 4, 5), (128, 32, 128, 4, 5), (128, 64, 128, 4, 4), (128, 64, 128, 4, 6),
        (128, 128, 128, 8, 4), (128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (256, 128, 128, 8, 3))
]  # fmt: skip
MAX_ERROR = 0.1
"""Maximum error: from quantizing activations, more where a few are large, and from bfloat16."""

Call = Callable[[torch.Tensor], torch.Tensor]


@frozen(kw_only=True, eq=False)
class Copy:
    """One layer's weights."""

    matrix: PackedMatrix
    quantized: torch.Tensor | None
    """The same memory as the matrix's packed words, as W8 values. None for other kinds."""

    def duplicate(self) -> Copy:
        """A copy in its own memory."""
        quantized = None if self.quantized is None else self.quantized.clone()
        packed = self.matrix.packed.clone() if quantized is None else self.matrix.layout.as_words(quantized)
        return Copy(matrix=evolve(self.matrix, packed=packed, scales=self.matrix.scales.clone()), quantized=quantized)


class Layers:
    """Enough copies of one layer to exceed the cache, and the ways to multiply by them."""

    def __init__(self, shape: str, kind: str, multiplier: WeightOnlyMatmul) -> None:
        self.shape, self.kind = shape, kind
        self.gated = shape == "gate_up"
        self.multiplier = multiplier
        rows, inputs = LINEARS[shape]
        copy = w8_matrix(kind, rows, inputs, multiplier) if kind in W8_KINDS else grouped(kind, rows, inputs)
        matrix, self.layout = copy.matrix, copy.matrix.layout
        self.gemm_shape = WeightOnlyShape(
            gated=self.gated, weight_rows=rows, inputs=inputs, layout=self.layout, zeros=matrix.zeros
        )
        self.kernel = w8_kernel(kind, self.gemm_shape, multiplier) if kind in W8_KINDS else None
        self.nbytes = matrix.packed.nbytes + matrix.scales.nbytes
        count = min(max(int(COLD_BYTES / self.nbytes), 2), MAX_COPIES)
        self.copies = [copy, *(copy.duplicate() for _ in range(count - 1))]
        plain = multiplier.dequantize(matrix, torch.empty(1, inputs, device=DEVICE).bfloat16())
        self.plain = [plain.clone() for _ in range(max(count // 2, 2))]

    def error(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """The error of a result, relative to float32 with the dequantized weights."""
        exact = self.activate(F.linear(x.float(), self.plain[0].float()))
        return float((y.float() - exact).norm() / exact.norm())

    def activate(self, y: torch.Tensor) -> torch.Tensor:
        """The activation, if the layer has one."""
        return act_and_mul(y) if self.gated else y

    def by_plain(self) -> list[Call]:
        """By cuBLAS and bfloat16 weights."""
        return [lambda x, weight=weight: self.activate(F.linear(x, weight)) for weight in self.plain]

    def autotuned_calls(self) -> Iterator[AutotunedCall]:
        """The calls that the engine autotunes."""
        for one in self.copies:
            if self.kernel is not None:
                yield from self.kernel.autotuned_calls({"weight": one.quantized, "scale": one.matrix.scales}, None)
            else:
                operands = Operands(weights=one.matrix.tensors)
                yield AutotunedCall(op=WeightOnlyOp(self.multiplier, self.gemm_shape), operands=operands)

    def choose(self, rows: Sequence[int], timer: GraphTimer, *, show: bool) -> None:
        """Autotune as an engine at start-up, without the cache."""
        tasks = group_calls(self.autotuned_calls())
        wanted = {next((task.rows for task in tasks if task.rows >= count), None) for count in rows}
        tasks = [task for task in tasks if task.rows in wanted]
        begin = time.perf_counter()
        for task, timings in zip(tasks, measure_tasks(tasks, timer), strict=True):
            candidate, result = pick_fastest(task, timings)
            task.choose(candidate)
            if show:
                print(f"    {result}, of {len(timings)}", *(f"left out: {name}" for name in task.failures))
        print(f"{self.shape} {self.kind}: tuned in {time.perf_counter() - begin:.1f} s", flush=True)

    def own(self) -> list[Call]:
        """As the engine multiplies."""
        if self.kernel is not None:
            apply = self.kernel.apply_gated if self.gated else self.kernel.apply
            return [
                lambda x, one=one: apply(x, {"weight": one.quantized, "scale": one.matrix.scales}, None)
                for one in self.copies
            ]
        return [lambda x, one=one: self.multiplier(x, one.matrix, gated=self.gated) for one in self.copies]

    def by_tile(self, tile: WeightOnlyTile) -> list[Call]:
        """By the weight-only kernel."""
        return [
            lambda x, one=one: self.multiplier.multiply_by_tile(x, one.matrix, None, self.gated, tile)
            for one in self.copies
        ]

    def dequantize_and_multiply(self) -> list[Call]:
        """By cuBLAS and dequantized weights."""
        return [
            lambda x, one=one: self.multiplier.dequantize_and_multiply(x, one.matrix, None, self.gated)
            for one in self.copies
        ]

    def by_w8a8(self, tile: W8A8Tile | None, fast: bool = True) -> list[Call]:
        """By the W8A8 GEMM. tile None: torch._scaled_mm."""

        def call(x: torch.Tensor, one: Copy) -> torch.Tensor:
            quantized, x_scale = quantize_rows(x, one.quantized.dtype)
            scales = one.matrix.scales
            if tile is not None:
                y = matmul(quantized, x_scale, one.quantized, scales, None, x.dtype, tile, self.multiplier.workspace)
            else:
                y = torch._scaled_mm(
                    quantized, one.quantized.t(), scale_a=x_scale[:, None], scale_b=scales[None, :], out_dtype=x.dtype,
                    use_fast_accum=fast,
                )  # fmt: skip
            return self.activate(y)

        return [lambda x, one=one: call(x, one) for one in self.copies]

    def ways(self, rows: int, sms: int) -> Iterator[tuple[str, list[Call]]]:
        """All ways worth measuring, by name."""
        if rows <= 2 * WEIGHT_ONLY_MAX_ROWS:
            for tile in self.tiles(rows, sms):
                yield f"tile {tile}", self.by_tile(tile)
        if rows >= 64 and self.kind in W8_KINDS and not self.layout.scale_rows:
            for tile in MATMULS:
                yield f"w8a8 {tile}", self.by_w8a8(tile)
            if self.kind == "fp8":
                yield "w8a8 _scaled_mm fast", self.by_w8a8(None)
                yield "w8a8 _scaled_mm exact", self.by_w8a8(None, fast=False)
        if rows >= 64 and self.layout.scale_layout != "outputs":
            yield "library", self.dequantize_and_multiply()

    def tiles(self, rows: int, sms: int) -> list[WeightOnlyTile]:
        """Tiles to try, with several numbers of splits."""
        columns = next((size for size in COLUMNS if size >= rows), COLUMNS[-1])
        scaled, block = self.layout.scale_layout != "outputs", self.layout.block
        tried = [
            WeightOnlyTile(rows=tile_rows, columns=columns, warps=warps, stages=stages)
            for (tile_rows, warps), stages in itertools.product(FEW_SHAPES, (4, 6))
        ]
        if columns > FEW_COLUMNS:
            tried = [
                WeightOnlyTile(
                    rows=one[0], columns=one[1], warps=one[2], stages=one[3], step=step, scales_weights=early
                )
                for one in MANY_SHAPES[columns]
                for step in {min(one[4], block), one[4] * block // 256}
                for early in ({False, scaled} if columns == EITHER_ORDER else {scaled})
            ]
        found = []
        for tile in dict.fromkeys(tried):
            if tile.shared_memory(self.layout) > shared_memory(DEVICE):
                continue
            usual = with_splits(tile, self.gemm_shape, rows, sms).splits
            for splits in sorted({max(usual // 2, 1), usual, usual * 2}):
                one = evolve(tile, splits=splits)
                if splits == 1 or (
                    splits * 2 <= self.gemm_shape.blocks
                    and fits_workspace(one, one.programs(self.gemm_shape, rows), splits)
                ):
                    found.append(one)
        return found

    def compile(self, rows: Sequence[int], sms: int) -> None:
        """Compile what `ways` will launch, in threads."""
        matrix = self.copies[0].matrix
        with (
            ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            for count in rows:
                x = torch.empty(count, self.gemm_shape.inputs, device=DEVICE, dtype=torch.bfloat16)
                tiles = self.tiles(count, sms) if count <= 2 * WEIGHT_ONLY_MAX_ROWS else []
                for tile in {evolve(tile, splits=min(tile.splits, 2)) for tile in tiles}:
                    self.multiplier.compile(x, matrix, None, self.gated, tile)


def w8_matrix(kind: str, rows: int, inputs: int, multiplier: WeightOnlyMatmul) -> Copy:
    """Random float8 or int8 weights."""
    dtype, granularity = W8_KINDS[kind]
    layout = W8Layout(dtype=dtype, scale_rows=128 if granularity == "block" else 0)
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=rows, inputs=inputs, layout=layout)
    weight = torch.randn(rows, inputs, device=DEVICE).bfloat16() / inputs**0.5
    prepared = w8_kernel(kind, gemm_shape, multiplier).prepare({"w.weight": weight})
    quantized, scales = prepared["weight"], prepared["scale"]
    return Copy(
        matrix=PackedMatrix(packed=layout.as_words(quantized), scales=scales, layout=layout), quantized=quantized
    )


def w8_kernel(kind: str, gemm_shape: WeightOnlyShape, multiplier: WeightOnlyMatmul) -> W8GpuKernel:
    """The quantization plugin's layer."""
    dtype, granularity = W8_KINDS[kind]
    form = W8Format(dtype=dtype, granularity=granularity, activations="token")
    part = LinearPart(name="w", out_features=gemm_shape.weight_rows)
    spec = LinearSpec(
        parts=(part,),
        in_features=gemm_shape.inputs,
        bias=False,
        dtype="bfloat16",
        device=str(DEVICE),
        gated=gemm_shape.gated,
    )
    return W8GpuKernel(spec, form, multiplier)


def grouped(kind: str, rows: int, inputs: int) -> Copy:
    """Random integers with scales of groups."""
    bits, group_size, has_zeros = GROUPED[kind]
    layout = GroupedLayout.choose(bits, group_size)
    values = torch.randint(0, 2**bits, (rows, inputs), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(-(-inputs // group_size), rows, device=DEVICE) / 100).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=DEVICE) if has_zeros else None
    packed, entries = layout.pack(values, scales, zeros, group_size, torch.bfloat16)
    return Copy(matrix=PackedMatrix(packed=packed, scales=entries, layout=layout), quantized=None)


def seconds(timer: GraphTimer, x: torch.Tensor, calls: Sequence[Call]) -> float:
    """Seconds of one call after a norm, weights not in cache. inf: the GPU lacks the resources."""
    scale = torch.ones_like(x[0])

    def all_calls() -> None:
        for call in calls:
            call(add_rms_norm(x, None, scale, 1e-5)[0])

    try:
        return timer.replayed(all_calls) / len(calls)
    except OutOfResources:
        return float("inf")


def inputs_of(rows: int, size: int) -> torch.Tensor:
    """Random activations with a few outliers, as models have."""
    x = torch.randn(rows, size, device=DEVICE)
    x[:, :: max(size // 8, 1)] *= 20
    return x.bfloat16()


def measure(timer: GraphTimer, layers: Layers, rows: Sequence[int], sms: int, *, tune: bool) -> list[Row]:
    """Measure one shape of one kind. Exits where a result is wrong."""
    inputs = layers.gemm_shape.inputs
    table = {count: seconds(timer, inputs_of(count, inputs), layers.own()) for count in rows}
    layers.choose(rows, timer, show=tune)
    if tune:
        layers.compile(rows, sms)
    floor = layers.nbytes / BANDWIDTH
    found = []
    for count in rows:
        x = inputs_of(count, inputs)
        own = layers.own()
        spent, baseline = seconds(timer, x, own), seconds(timer, x, layers.by_plain())
        error = layers.error(x, own[0](x))
        print(
            f"{layers.shape:<8}{layers.kind:<6}{count:>5} rows  floor {floor * 1e6:5.1f}  engine {spent * 1e6:7.1f} us"
            f"  table {table[count] * 1e6:7.1f}  bf16 {baseline * 1e6:7.1f}  x{baseline / spent:4.2f}"
            f"  {layers.nbytes / spent / 1e12:4.2f} TB/s  error {error:.4f}",
            flush=True,
        )
        if not error < MAX_ERROR:
            sys.exit(f"{layers.shape} {layers.kind} at {count} rows is wrong")
        name = f"{layers.shape} {layers.kind} {count} rows"
        found.append(Row(metric=name, value=spent * 1e6, unit="us", baseline=baseline * 1e6, baseline_name="bf16"))
        if tune:
            show_best(timer, layers, x, sms)
    return found


def show_best(timer: GraphTimer, layers: Layers, x: torch.Tensor, sms: int) -> None:
    """Print the best three of each kind of way, and those with wrong results."""
    timed: dict[str, list[tuple[float, str]]] = {}
    for name, calls in layers.ways(x.shape[0], sms):
        spent = seconds(timer, x, calls)
        if spent == float("inf"):
            continue
        if not layers.error(x, calls[0](x)) < MAX_ERROR:
            print(f"        WRONG  {name}")
            continue
        timed.setdefault(name.split()[0], []).append((spent, name))
    for ranked in timed.values():
        for spent, name in sorted(ranked)[:3]:
            print(f"        {spent * 1e6:8.1f} us  {name}", flush=True)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--kinds", nargs="*", choices=[*W8_KINDS, *GROUPED], default=["fp8", "int8", "4bit"])
    parser.add_argument("--shapes", nargs="*", choices=list(LINEARS), default=list(LINEARS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found: list[Row] = []
    with torch.inference_mode():
        timer, multiplier = GraphTimer(DEVICE), WeightOnlyMatmul(DEVICE)
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        for kind in arguments.kinds:
            for shape in arguments.shapes:
                layers = Layers(shape, kind, multiplier)
                found += measure(timer, layers, arguments.rows, sms, tune=arguments.tune)
                del layers
                torch.cuda.empty_cache()
    if arguments.json is not None:
        machine = f"{torch.cuda.get_device_name(DEVICE)}, triton {triton.__version__}"
        settings = {"dtype": "bfloat16", "model": "Llama-3.1-8B", "bandwidth": BANDWIDTH}
        write(arguments.json, report("quant_kernels", machine, found, settings))


if __name__ == "__main__":
    main()
