"""Quantized layers as autotuned ops: which calls a layer has, and that the chosen tile is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.core import Engine, SamplingParams
from engine.core.autotune.cache import TuningCache
from engine.core.autotune.tuner import collect_tasks, tune_tasks
from engine.core.layers import LayerFactory
from engine.core.quant.base import LinearPart, LinearSpec
from engine.ops.activation.quantize_rows import Scaling
from engine.ops.common.launch import has_wgmma
from engine.ops.gemm import scaled_matmul
from engine.ops.gemm.packed_layout import GroupedLayout, W8Layout
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.transposed_launch import TransposedTile
from engine.ops.gemm.weight_only_candidates import (
    MEASURED_CLASSES,
    PERSISTENT_CLASSES,
)
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.plugins.quant import w8a8_matmul, w8a8_shape
from engine.plugins.quant.w4a16 import GroupScheme, QuantizedWeight, Reader
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w8_gpu import (
    W8A16_MAX_ROWS,
    W8A16_MAX_ROWS_WGMMA,
    DequantizeEachCallKernel,
    W8GpuKernel,
)
from engine.plugins.quant.w8_kernel import W8Format
from engine.plugins.quant.w8a8_matmul import W8A8Matmul, has_tensor_cores_for
from engine.plugins.quant.w8a8_tiles import PERSISTENT_CLASS, ROW_CLASSES, TRANSPOSED_TILES
from engine.plugins.quant.w8a8_tuning import W8A8Op
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls
from engine.testing.checkpoints import make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = "bfloat16" if DEVICE.type == "cuda" else "float16"  # of which the interpreter can multiply matrices
MACHINE = {"device": "GPU", "pytorch": "1", "triton": "2"}
LIMIT = 2**-6
MOST_CANDIDATES = 16
FEW = "weight-only 64x256 int8, a scale per output, " + HALF
MANY = "w8a8 64x256 int8, " + HALF


def w8_kernel(
    multiplier: Any,
    activations: Any,
    *,
    dtype: Any = HALF,
    kind: str = "int8",
    granularity: str = "channel",
    gated: bool = False,
    cls: Any = W8GpuKernel,
) -> Any:
    codes = {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    parts = tuple(LinearPart(name=name, out_features=32) for name in ("gate", "up"))
    spec = LinearSpec(parts=parts, in_features=256, bias=False, dtype=dtype, device=str(DEVICE), gated=gated)
    return cls(spec, W8Format(dtype=codes, granularity=granularity, activations=activations), multiplier)


def prepared(kernel: Any) -> Any:
    return kernel.prepare({f"{part.name}.weight": torch.randn(32, 256, device=DEVICE) for part in kernel.spec.parts})


def described(kernel: Any, weights: Any, bias: Any = None) -> Any:
    return [(one.op.key, tuple(one.op.row_classes)) for one in kernel.autotuned_calls(weights, bias)]


@pytest.fixture
def multiplier() -> Any:
    return WeightOnlyMatmul(DEVICE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records the names of the tiles that are used, in order."""
    names = []
    multiply_by_tile, matmul = WeightOnlyMatmul.multiply_by_tile, scaled_matmul.matmul
    monkeypatch.setattr(
        WeightOnlyMatmul, "multiply_by_tile", lambda *given: names.append(str(given[5])) or multiply_by_tile(*given)
    )
    monkeypatch.setattr(
        w8a8_matmul, "matmul", lambda *given, **more: names.append(str(given[6])) or matmul(*given, **more)
    )
    return names


def test_the_number_of_rows_alone_decides_between_w8a16_and_w8a8(multiplier: Any) -> None:
    """Candidates of a row class are either all W8A16 or all W8A8."""
    for activations, words in (("token", "a scale per row"), ("static", "a stored scale")):
        kernel = w8_kernel(multiplier, activations)
        weights = dict(prepared(w8_kernel(multiplier, "token")))
        if activations == "static":
            weights["input_scale"] = torch.ones(1, device=DEVICE)
        few, many = described(kernel, weights)
        assert few == (FEW, () if has_wgmma(DEVICE) else (16, 32))
        assert many == (f"{MANY} with {words}", ROW_CLASSES)
    kernel = w8_kernel(multiplier, "none")
    assert described(kernel, prepared(kernel)) == [(FEW, MEASURED_CLASSES)]
    kernel = w8_kernel(multiplier, "token", kind="fp8", granularity="block")
    few, many = described(kernel, prepared(kernel))
    assert "a scale per block of 32 outputs" in few[0]
    assert few[1] == (16, 32)
    assert many == (
        f"w8a8 64x256 float8_e4m3fn, {HALF} with a scale per 128 inputs and blocks of 32 outputs",
        ROW_CLASSES,
    )


def test_fewer_rows_are_w8a8_where_it_has_persistent_tiles(multiplier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with scales of blocks, and not on GPUs without wgmma, where that has not been measured."""
    for wgmma in (True, False):
        monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device, wgmma=wgmma: wgmma)
        for granularity in ("channel", "block"):
            kernel = w8_kernel(multiplier, "token", kind="fp8", granularity=granularity)
            most = W8A16_MAX_ROWS_WGMMA if wgmma and granularity == "channel" else W8A16_MAX_ROWS
            assert [kernel._is_w8a8(rows) for rows in (1, most, most + 1, 4096)] == [False, False, True, True]
            few, many = kernel.autotuned_calls(prepared(kernel), None)
            assert tuple(few.op.row_classes) == tuple(rows for rows in MEASURED_CLASSES if rows <= most)
            assert many.op.row_classes[0] > most


def test_layers_with_one_implementation_are_not_autotuned(multiplier: Any) -> None:
    kernel = w8_kernel(multiplier, "token", dtype="float32")
    assert not kernel.autotuned_calls(prepared(kernel), None)
    kernel = w8_kernel(multiplier, "token", cls=DequantizeEachCallKernel)
    assert not kernel.autotuned_calls(prepared(kernel), None)


class Groups(Reader):
    """Symmetric weights of 4 bits; `orders`: what group each input of a part is in."""

    scheme = GroupScheme(bits=4, group_size=64)

    def __init__(self, orders: Any = ()) -> None:
        self.orders = dict(orders)

    def tensors(self, part: Any, spec: Any) -> Any:
        return {}

    def read(self, part: Any, spec: Any, loaded: Any) -> Any:
        values = torch.randint(0, 16, (32, 256), dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(4, 32, device=DEVICE).half() / 16
        return QuantizedWeight(values=values, scales=scales, zeros=None, group_of=self.orders.get(part.name))


def packed(orders: Any = (), *, gated: bool = True) -> Any:
    parts = tuple(LinearPart(name=name, out_features=32) for name in ("gate", "up"))
    spec = LinearSpec(parts=parts, in_features=256, bias=True, dtype=HALF, device=str(DEVICE), gated=gated)
    return W4A16Kernel(spec, Groups(orders), WeightOnlyMatmuls())


def test_packed_weights_are_one_call_per_order_of_inputs() -> None:
    bias = torch.randn(64, device=DEVICE)
    kernel = packed()
    weights = kernel.pack_weights({})
    layout = GroupedLayout.choose(4, 64)
    classes = (*MEASURED_CLASSES, *(PERSISTENT_CLASSES if has_wgmma(DEVICE) else ()))
    assert described(kernel, weights, bias) == [(f"weight-only gated 64x256 {layout}, {HALF}", classes)]
    shuffled = torch.randperm(256, device=DEVICE).to(torch.int32) // 64
    kernel = packed({"up": shuffled})
    weights = kernel.pack_weights({})
    assert described(kernel, weights, bias) == [(f"weight-only 32x256 {layout}, {HALF}", classes)] * 2
    first, second = kernel.autotuned_calls(weights, bias)
    assert torch.equal(torch.cat([first.operands.bias, second.operands.bias]), bias)
    for one in (first, second):
        x = torch.randn(16, 256, device=DEVICE).to(getattr(torch, HALF)) / 16
        usual, *others = (one.op.run(tile, x, one.operands) for tile in one.op.candidates(16))
        assert all(float((y - usual).norm() / usual.norm()) < LIMIT for y in others)
    assert not kernel.autotuned_calls({"weight": torch.zeros(64, 256)}, None)


def test_packed_weights_are_multiplied_by_the_chosen_tile(taken: Any) -> None:
    kernel = packed(gated=False)
    weights = kernel.pack_weights({})
    x = torch.randn(11, 256, device=DEVICE).to(getattr(torch, HALF)) / 16
    usual = kernel.apply(x, weights, None)
    [one] = kernel.autotuned_calls(weights, None)
    taken.clear()
    for tile in one.op.candidates(16):
        one.op.choose(16, tile)
        y = kernel.apply(x, weights, None)
        assert taken.pop() == str(tile)
        assert float((y - usual).norm() / usual.norm()) < LIMIT


@pytest.mark.parametrize("has_scaled_mm", [False, True])
@pytest.mark.parametrize("outputs", [64, 4096, 6144, 28672])
def test_w8a8_candidates_are_few_and_begin_with_the_default(
    outputs: int, has_scaled_mm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w8a8_shape, "has_capability", lambda device, least: has_scaled_mm)
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: 132)
    workspace = Workspace(torch.device("cpu"))
    codes = W8A8Matmul(workspace, torch.float8_e4m3fn, outputs, 4096, torch.bfloat16)
    op = W8A8Op(codes, static=False)
    for rows in op.row_classes:
        found = op.candidates(rows)
        assert found[0] == codes.tile(rows)
        assert len({op.name(tile) for tile in found}) == len(found) <= MOST_CANDIDATES
        assert (None in found) == has_scaled_mm
    other = W8A8Matmul(workspace, torch.int8, outputs, 4096, torch.bfloat16)
    assert not other.shape.has_scaled_mm


@pytest.mark.parametrize(
    ("outputs", "tile_outputs"),
    [(5120, 128), (4352, 128), (5632, 128), (2560, 64), (4096, None), (6144, None), (1024, None)],
)
def test_rows_that_fill_three_tiles_have_a_tile_of_one_wave(
    outputs: int, tile_outputs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was chosen for 256 rows, and where persistent tiles can be used only."""
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: 132)
    for wgmma in (True, False):
        monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device, wgmma=wgmma: wgmma)
        codes = W8A8Matmul(Workspace(torch.device("cpu")), torch.int8, outputs, 4096, torch.bfloat16)
        chosen = w8a8_shape.LARGE_TILE
        for rows in codes.row_classes:
            codes.choose(rows, chosen)
        assert [codes.tile(rows) for rows in (128, 193, 256)] == [chosen] * 3
        for rows in (129, 150, 192):
            tile = codes.tile(rows)
            if wgmma and tile_outputs is not None:
                assert (tile.rows, tile.outputs, tile.persistent) == (64, tile_outputs, True)
                assert tile.programs(rows, outputs) <= 132 < tile.programs(256, outputs)
                assert PERSISTENT_CLASS not in codes.row_classes
            else:
                assert tile == chosen


@pytest.mark.parametrize(("rows", "row_class"), [(129, 192), (192, 192), (193, 256), (256, 256)])
def test_gated_layers_activate_in_transposed_products(
    rows: int, row_class: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where such a tile is chosen for the row class, which is measured with wgmma only."""
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: 132)
    for wgmma in (True, False):
        monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device, wgmma=wgmma: wgmma)
        codes = W8A8Matmul(Workspace(torch.device("cpu")), torch.int8, 28672, 4096, torch.bfloat16)
        assert (PERSISTENT_CLASS in codes.row_classes) == wgmma
        for size in codes.row_classes:
            assert codes.shape.candidates(size)[0] == codes.shape.default_tile(size)
            transposed = [tile for tile in codes.shape.candidates(size) if isinstance(tile, TransposedTile)]
            assert transposed == list(TRANSPOSED_TILES.get(size, ()) if wgmma else ())
            if wgmma and size == row_class:
                assert not codes.fuses_gating(rows)
                codes.choose(size, transposed[0])
                assert codes.tile(rows) == transposed[0]
                assert rows <= transposed[0].rows
                assert codes.fuses_gating(rows)
        assert [codes.fuses_gating(other) for other in (128, 257, 512, 513)] == [False, False, False, wgmma]


@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("scale_rows", [0, 128])
def test_w8a8_candidates_fit_the_shared_memory_and_registers(
    shared: int, scale_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: 132)
    monkeypatch.setattr(w8a8_shape, "shared_memory", lambda device: shared)
    scaling = Scaling(per_block=scale_rows > 0)
    workspace = Workspace(torch.device("cpu"))
    codes = W8A8Matmul(
        workspace, torch.float8_e4m3fn, 4096, 4096, torch.bfloat16, scale_rows=scale_rows, scaling=scaling
    )
    for rows in ROW_CLASSES:
        tiles = codes.shape.candidates(rows)
        assert tiles[0] == codes.shape.default_tile(rows)
        assert len(tiles) > 1
        for tile in tiles:
            assert tile is not None
            assert tile.stages >= 2
            assert tile.stages * (tile.rows + tile.outputs) * tile.block_k < shared
            assert not scale_rows or tile.rows * tile.outputs // (32 * tile.warps) <= 64


@pytest.mark.parametrize(("rows", "static"), [(40, False), (40, True), (66, False)])
def test_every_w8a8_candidate_is_correct(multiplier: Any, rows: int, static: bool) -> None:
    kernel = w8_kernel(multiplier, "token")
    weights = dict(prepared(kernel))
    if static:
        weights["input_scale"] = torch.tensor([1 / 32], device=DEVICE)
    bias = torch.randn(64, device=DEVICE).to(getattr(torch, HALF))
    _, many = kernel.autotuned_calls(weights, bias)
    whole = torch.randint(-127, 128, (rows, 256), device=DEVICE)
    whole[:, 0] = 127
    x = (whole / 32).to(getattr(torch, HALF))
    codes = W8Layout(dtype="int8").unpack(weights["weight"], 256).double()
    exact = F.linear(x.double(), codes * weights["scale"].double()[:, None], bias.double())
    for tile in many.op.candidates(next(most for most in ROW_CLASSES if most >= rows)):
        y = many.op.run(tile, x, many.operands)
        assert y.shape == exact.shape
        assert float((y.double() - exact).norm() / exact.norm()) < LIMIT


def test_a_chosen_w8a8_tile_serves_its_row_class(multiplier: Any, taken: Any) -> None:
    kernel = w8_kernel(multiplier, "token")
    weights = prepared(kernel)
    _, many = kernel.autotuned_calls(weights, None)
    x = torch.randn(129, 256, device=DEVICE).to(getattr(torch, HALF)) / 16
    usual = {}
    for rows in (33, 64, 65, 128, 129):
        kernel.apply(x[:rows], weights, None)
        usual[rows] = taken.pop()
    mine = next(tile for tile in many.op.candidates(128) if str(tile) not in usual.values())
    many.op.choose(128, mine)
    for rows, tile in usual.items():
        kernel.apply(x[:rows], weights, None)
        assert taken.pop() == (str(mine) if 64 < rows <= 128 else tile)
    assert not taken


class W8OnGpu:
    """A method with the GPU kernels, which Triton's interpreter runs on a CPU."""

    def __init__(self) -> None:
        self.multiplier = WeightOnlyMatmul(DEVICE)

    def ignored(self) -> Any:
        return ()

    def linear(self, spec: Any) -> Any:
        return W8GpuKernel(spec, W8Format(dtype="int8", granularity="channel", activations="token"), self.multiplier)


class FakeTimer:
    """The last candidate is the fastest, and no refinement is faster."""

    def __init__(self) -> None:
        self.asked = {}

    def prepare(self, wanted: Any) -> None:
        pass

    def seconds(self, task: Any, candidate: Any) -> Any:
        order = self.asked.setdefault(task.key, [])
        order.append(candidate)
        first = len(task.op.candidates(task.rows))
        return 10.0 - len(order) if len(order) <= first else 20.0


def tuned(tmp_path: Any) -> Any:
    """Two layers of one size, autotuned: the layers, the report and the timer."""
    torch.manual_seed(0)
    layers = LayerFactory(dtype=HALF, device=str(DEVICE), quant=W8OnGpu())
    for index in range(2):
        layers.linear([(f"{index}.gate", 32), (f"{index}.up", 32)], 256)
    for layer in layers.layers:
        layer.fill({name: torch.randn(spec.shape, device=DEVICE) for name, spec in layer.tensors().items()})
    timer = FakeTimer()
    report = tune_tasks(collect_tasks(layers), TuningCache(tmp_path, MACHINE), timer)
    return layers, report, timer


def test_layers_of_one_size_share_results_that_the_next_start_reads(tmp_path: Path, taken: Any) -> None:
    layers, report, timer = tuned(tmp_path)
    assert report.measured == len(report.results) == 2 + len(ROW_CLASSES)  # of few rows, and of many
    assert {result.op for result in report.results} == {FEW, f"{MANY} with a scale per row"}
    assert all(len(set(asked)) == len(asked) for asked in timer.asked.values())
    again, second, timer = tuned(tmp_path)
    assert second.measured == 0
    assert not timer.asked
    assert second.results == report.results
    chosen = {(result.op, result.rows): result.candidate for result in second.results}
    x = torch.randn(100, 256, device=DEVICE).to(getattr(torch, HALF)) / 16
    many = f"{MANY} with a scale per row"
    for started in (layers, again):
        for layer in started.layers:
            for rows in (11, 20, 60, 100):
                layer(x[:rows])
            assert taken == [chosen[place] for place in ((FEW, 16), (FEW, 32), (many, 64), (many, 128))]
            taken.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["fp8", "int8"])
def test_an_engine_is_tuned_and_generates(tmp_path: Path, quant: str) -> None:
    path = make_checkpoint(
        tmp_path / "model", "qwen3", tokenizer=True, hidden_size=512, intermediate_size=1024, num_hidden_layers=2
    )
    prompts = [[(11 * row + 5 * column) % 500 for column in range(3 + row)] for row in range(40)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    cache = tmp_path / "kernels"
    found, written = [], []
    for _ in range(2):
        with Engine(
            model=str(path),
            model__dtype="bfloat16",
            quant=quant,
            cache__memory="64MiB",
            executor__kernel_cache=str(cache),
        ) as engine:
            found.append([list(completion.token_ids) for completion in engine.generate(prompts, greedy)])
        [file] = cache.iterdir()
        written.append((file.read_text(), file.stat().st_mtime_ns))
    assert all(len(tokens) == 8 for tokens in found[0])
    assert found[0] == found[1]
    assert written[0] == written[1]  # the second start measured nothing
    results = json.loads(written[0][0])["results"]
    kinds = {result["op"].split()[0] for result in results}
    # With wgmma, the tiles of few rows follow from rules.
    assert ("weight-only" in kinds) == (not has_wgmma(DEVICE))
    assert ("w8a8" in kinds) == has_tensor_cores_for(DEVICE, torch.float8_e4m3fn if quant == "fp8" else torch.int8)
    assert all(0 < result["seconds"] < 1e-2 for result in results)
