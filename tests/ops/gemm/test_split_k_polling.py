"""Split-K by polling: sums are exact, do not depend on timing, and the buffer is empty afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from engine.ops.common.polling import EMPTY
from engine.ops.gemm.packed_layout import PackedMatrix, W8Layout
from engine.ops.gemm.skinny_launch import MAX_POLLED_SUMS, Workspace
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import FINE_TILE, WeightOnlyTile

from .w8a8 import Operands, check_close

LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
FINE = evolve(FINE_TILE, step=128)


@pytest.fixture
def multiplier(device: torch.device) -> Any:
    return WeightOnlyMatmul(device)


def matrix_of(operands: Operands) -> PackedMatrix:
    layout = W8Layout(dtype=str(operands.weight.dtype).removeprefix("torch."))
    return PackedMatrix(packed=layout.as_words(layout.pack(operands.weight)), scales=operands.scale, layout=layout)


def is_empty(multiplier: WeightOnlyMatmul) -> bool:
    return bool((multiplier.workspace.polled_sums == EMPTY.value).all())


@pytest.mark.parametrize("splits", [2, 3, 5, 16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", [FINE, WeightOnlyTile(rows=64, columns=16, warps=4, stages=4, step=128)], ids=str)
def test_sums_are_exact_and_the_buffer_is_empty_afterwards(
    multiplier: Any, device: torch.device, half: torch.dtype, tile: WeightOnlyTile, gated: bool, splits: int
) -> None:
    operands = Operands("int8", 6, 160, 2048, device, biased=True, half=half)
    matrix, split = matrix_of(operands), evolve(tile, splits=splits)
    exact = operands.exact(codes=False)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    first = multiplier.multiply_by_tile(operands.x, matrix, operands.bias, gated, split)
    check_close(first, exact, LIMIT[half])
    assert torch.equal(multiplier.multiply_by_tile(operands.x, matrix, operands.bias, gated, split), first)
    assert is_empty(multiplier)


def test_nan_is_added_and_not_waited_for(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands("int8", 2, 32, 512, device, half=half)
    operands.x[1, 7] = torch.tensor([-1], dtype=torch.int16, device=device).view(half)[0]
    y = multiplier.multiply_by_tile(operands.x, matrix_of(operands), None, False, evolve(FINE, splits=4))
    assert y[1].isnan().all()
    assert not y[0].isnan().any()
    assert is_empty(multiplier)


def test_few_sums_are_polled() -> None:
    polled = Workspace(torch.device("cpu")).polled
    assert [polled(splits, 128, 256) for splits in (1, 2, 3, 5, 6, 9, 17, 18)] == [0, 1, 2, 4, 8, 8, 16, 0]
    assert [polled(splits, 1024, 64) for splits in (2, 3, 4)] == [1, 2, 0]
    most = MAX_POLLED_SUMS // 128
    assert [polled(2, 128, tiles) for tiles in (most, most + 1)] == [1, 0]


@pytest.mark.gpu
def test_results_are_the_same_in_every_replay_of_a_graph(multiplier: Any, device: torch.device) -> None:
    layers = []
    sizes = ((1024, 3072, 6), (4096, 1024, 2), (2752, 15040, 6), (9024, 3008, 4), (32, 2048, 8))
    for outputs, inputs, splits in sizes:
        operands = Operands("fp8", 4, outputs, inputs, device, half=torch.bfloat16)
        layers.append((operands.x, matrix_of(operands), evolve(FINE, splits=splits)))

    def multiply() -> list[torch.Tensor]:
        return [multiplier.multiply_by_tile(x, matrix, None, False, tile) for x, matrix, tile in layers * 4]

    first = [y.clone() for y in multiply()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = multiply()
    for _ in range(500):
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(y, expected) for y, expected in zip(results, first, strict=True))
    assert is_empty(multiplier)
