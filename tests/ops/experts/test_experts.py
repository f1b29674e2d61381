"""The kernels of experts against PyTorch operations, with uneven routings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.layers.activation import gated_activation
from engine.core.layers.experts import sum_of_experts
from engine.core.layers.routing import RoutingSpec, route as plain_route
from engine.core.quant.experts import Routing
from engine.ops.experts.dequantize import dequantize
from engine.ops.experts.experts_mlp import ExpertsTile, ExpertsWeights, experts_mlp
from engine.ops.experts.grouped_matmul import GroupedTile, grouped_matmul
from engine.ops.experts.grouped_matmul_4bit import MAX_ROWS_OF_SCALED_SUMS
from engine.ops.experts.one_token import RowsTile, experts_of_one_token
from engine.ops.experts.pack import pack_fp4, pack_int4, scale_dtype
from engine.ops.experts.quantize import quantize_activations
from engine.ops.experts.route import route
from engine.ops.experts.sort import PairSorter, SortedPairs, max_tiles
from engine.ops.experts.tiles import SHAPES_OF_4_BITS
from engine.ops.experts.weights import StackedWeight, WeightFormat

TILE = GroupedTile(outputs=64, block_k=64, warps=4, stages=2)
HIDDEN, INNER, EXPERTS = 48, 40, 6
"""Multiples of no tile."""

ROUTINGS = {
    "one token": [[4, 1]],
    "an expert without tokens": [[0, 1], [3, 0], [5, 3], [1, 0], [0, 5]],
    "one expert for all": [[2]] * 21,
    "all experts for each": [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4]],
    "experts of other ranks": [[-1, 4], [2, -1], [-1, -1], [4, 2]],
}


def routing_of(name: str, device: torch.device) -> Routing:
    experts = torch.tensor(ROUTINGS[name], dtype=torch.int32, device=device)
    return Routing(experts, torch.rand(experts.shape, device=device) + 0.5)


def expected_rows(pairs: SortedPairs, tile_rows: int) -> list[tuple[int, int]]:
    """(expert, pair) of each row that a used tile covers."""
    found = []
    tiles = zip(pairs.tile_experts.tolist(), pairs.tile_begins.tolist(), pairs.tile_ends.tolist(), strict=True)
    for expert, begin, end in tiles:
        if expert >= 0:
            assert begin < end
            found += [(expert, int(pairs.order[row])) for row in range(begin, min(begin + tile_rows, end))]
    return found


@pytest.mark.parametrize(
    ("sigmoid", "renormalize", "rank_experts"),
    [(False, True, range(11)), (False, False, range(4, 8)), (True, True, range(11))],
)
def test_route_chooses_what_torch_does(
    sigmoid: bool, renormalize: bool, rank_experts: range, device: torch.device
) -> None:
    logits = torch.randn(5, 12, device=device)[:, :11]
    logits[2] = 0.0  # equal scores: the first experts
    spec = RoutingSpec(
        num_experts=11, top_k=3, scoring="sigmoid" if sigmoid else "softmax", renormalize=renormalize, scale=2.5
    )
    wanted = plain_route(logits, spec, rank_experts)
    experts, weights = route(logits, 3, sigmoid=sigmoid, renormalize=renormalize, scale=2.5, rank_experts=rank_experts)
    assert torch.equal(experts, wanted.experts)
    torch.testing.assert_close(weights, wanted.weights)


def test_route_keeps_a_nan(device: torch.device) -> None:
    logits = torch.full((1, 4), torch.nan, device=device)
    experts, weights = route(logits, 2, sigmoid=False, renormalize=True, scale=1.0, rank_experts=range(4))
    assert sorted(experts[0].tolist()) == [0, 1]
    assert weights.isnan().all()


@pytest.mark.parametrize("name", ROUTINGS)
def test_sort_covers_each_pair_once_in_tiles_of_its_expert(name: str, device: torch.device) -> None:
    experts = routing_of(name, device).experts
    chosen = [(expert, pair) for pair, expert in enumerate(experts.flatten().tolist()) if expert >= 0]
    found = expected_rows(PairSorter(EXPERTS, experts.shape[1], device)(experts, 8), 8)
    assert (found if len(experts) == 1 else sorted(found)) == (chosen if len(experts) == 1 else sorted(chosen))


@pytest.mark.parametrize(
    ("max_few", "max_counted"),
    [(2048, 8192), (0, 8192), (0, 0)],
    ids=["compared with all", "counted by each program", "counted before"],
)
def test_sort_keeps_the_order_of_an_experts_pairs_over_blocks(
    max_few: int, max_counted: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.experts.sort.MAX_FEW", max_few)
    monkeypatch.setattr("engine.ops.experts.sort.FEW_COMPARED", 64)
    monkeypatch.setattr("engine.ops.experts.sort.MAX_COUNTED", max_counted)
    monkeypatch.setattr("engine.ops.experts.sort.BLOCK", 32)
    monkeypatch.setattr("engine.ops.experts.sort.COUNTED", 64)
    experts = torch.randint(-1, 5, (73, 2), dtype=torch.int32, device=device)
    pairs = PairSorter(7, 2, device)(experts, 8)
    chosen = sorted((expert, pair) for pair, expert in enumerate(experts.flatten().tolist()) if expert >= 0)
    assert expected_rows(pairs, 8) == chosen
    assert len(pairs.tile_experts) == max_tiles(146, 7, 8)
    tile_experts = pairs.tile_experts[: int(pairs.used_tiles)].tolist()
    assert -1 not in tile_experts
    assert set(pairs.tile_experts[len(tile_experts) :].tolist()) <= {-1}
    assert pairs.tile_firsts.tolist()[: len(tile_experts)] == [tile_experts.index(expert) for expert in tile_experts]
    assert pairs.claims.tolist() == [0, 0]


def plain_weights(dtype: torch.dtype, device: torch.device) -> ExpertsWeights:
    form = WeightFormat(kind="plain")

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype)

    return ExpertsWeights(
        gate_up=StackedWeight(values=random(EXPERTS, 2 * INNER, HIDDEN), format=form),
        down=StackedWeight(values=random(EXPERTS, HIDDEN, INNER), format=form),
        gate_up_bias=random(EXPERTS, 2 * INNER),
        down_bias=random(EXPERTS, HIDDEN),
    )


def reference(x: torch.Tensor, routing: Routing, weights: ExpertsWeights, activation: Any) -> torch.Tensor:
    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(rows, weights.gate_up.values[expert], weights.gate_up_bias[expert])
        hidden = gated_activation(activation)(hidden)
        return torch.nn.functional.linear(hidden, weights.down.values[expert], weights.down_bias[expert])

    return sum_of_experts(x, routing, EXPERTS, compute)


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_compute_what_torch_does(name: str, device: torch.device) -> None:
    weights, routing = plain_weights(torch.float32, device), routing_of(name, device)
    x = torch.randn(len(routing.experts), HIDDEN, device=device)
    tile = ExpertsTile(rows=16, gate_up=TILE, down=TILE)
    activation = "swiglu_oai" if name == "one token" else "silu"
    sorter = PairSorter(EXPERTS, routing.experts.shape[1], device)
    found = experts_mlp(x, routing.experts, routing.weights, weights, activation, tile, sorter)
    torch.testing.assert_close(found, reference(x, routing, weights, activation), atol=2e-5, rtol=1e-5)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""E2M1 numbers by their bits."""


def four_bits(
    kind: Any, group: int, zeros: bool, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[StackedWeight, torch.Tensor]:
    """Random matrices of 40 outputs and 176 inputs, which fill no block, and what they mean, in float32."""
    outputs, inputs = 40, 176
    groups = -(-inputs // group)
    of_input = torch.arange(inputs) // group
    packed, meant = [], []
    for expert in range(EXPERTS):
        q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        if kind == "fp4":
            scales = torch.randint(110 + 2 * expert, 120 + 2 * expert, (groups, outputs), dtype=torch.uint8)
            meant.append(FP4[q.long()] * 2.0 ** (scales.float() - 127)[of_input].T)
            packed.append(pack_fp4(q, scales))
        else:
            scales = (torch.rand(groups, outputs) + 0.5).to(scale_dtype(dtype))
            zero = torch.randint(0, 16, (groups, outputs), dtype=torch.uint8)
            centre = zero if zeros else torch.full_like(zero, 8)
            meant.append((q.float() - centre.float()[of_input].T) * scales.float()[of_input].T)
            packed.append(pack_int4(q, scales, zero if zeros else None, group, dtype))
    factors = [one.factor for one in packed if one.factor is not None]
    weight = StackedWeight(
        values=torch.stack([one.values for one in packed]).to(device),
        format=WeightFormat(kind=kind, group=group),
        scales=torch.stack([one.scales for one in packed]).to(device),
        factors=torch.stack(factors).to(device) if factors else None,
    )
    return weight, torch.stack(meant).to(device)


def eight_bits(kind: Any, dtype: torch.dtype, device: torch.device) -> tuple[StackedWeight, torch.Tensor]:
    outputs, inputs = 160, 176
    values = torch.randint(-8, 9, (EXPERTS, outputs, inputs)).float()
    if kind == "channel":
        form, scales = WeightFormat(kind="channel"), torch.rand(EXPERTS, outputs) + 0.5
        meant = values * scales[:, :, None]
    else:
        form, scales = WeightFormat(kind="block", scale_rows=32), torch.rand(EXPERTS, 5, 2) + 0.5
        spread = scales.repeat_interleave(32, 1).repeat_interleave(128, 2)[:, :, :inputs]
        meant = values * spread
    return StackedWeight(values=values.to(dtype).to(device), format=form, scales=scales.to(device)), meant.to(device)


FORMATS = {
    "int8 per channel": lambda device: eight_bits("channel", torch.int8, device),
    "fp8 per channel": lambda device: eight_bits("channel", torch.float8_e4m3fn, device),
    "fp8 blocks": lambda device: eight_bits("block", torch.float8_e4m3fn, device),
    "int4 in groups of 128": lambda device: four_bits("int4", 128, False, device),
    "int4 in groups of 64": lambda device: four_bits("int4", 64, False, device),
    "int4 in groups of 32, zero points": lambda device: four_bits("int4", 32, True, device),
    "fp4": lambda device: four_bits("fp4", 32, False, device),
}


@pytest.mark.parametrize(
    ("case", "gated", "rows"),
    [
        *((case, False, 16) for case in FORMATS),
        ("fp8 blocks", True, 16),
        ("fp4", True, 8),
        ("int4 in groups of 128", True, 8),
        ("int4 in groups of 128", False, 32),
    ],
)
def test_quantized_weights_are_multiplied_as_what_they_mean(
    case: str, gated: bool, rows: int, device: torch.device
) -> None:
    weight, meant = FORMATS[case](device)
    experts = routing_of("an expert without tokens", device).experts
    pairs = PairSorter(EXPERTS, 2, device)(experts, rows)
    x = torch.randn(len(experts), meant.shape[2], device=device)
    tile = evolve(TILE, block_k=weight.format.block_k(TILE.block_k))
    found = grouped_matmul(
        x,
        weight,
        pairs,
        rows,
        tile,
        dtype=x.dtype,
        top_k=2,
        gather=True,
        scatter=True,
        activation="silu" if gated else None,
    )
    tokens = torch.arange(experts.numel(), device=device) // 2
    wanted = torch.einsum("pi,poi->po", x[tokens], meant[experts.flatten().long()])
    wanted = gated_activation("silu")(wanted) if gated else wanted
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "group", "rows", "number"),
    [
        *((kind, group, 8, 0) for kind, group in (("fp4", 32), ("int4", 64), ("int4", 128))),
        ("fp4", 32, 8, 2),
        ("int4", 128, 8, 2),
        ("fp4", 32, 16, 0),
        ("int4", 128, 16, 0),
        ("int4", 64, 64, 0),
        ("int4", 128, 64, 0),
        ("fp4", 32, 128, 1),
    ],
)
def test_tiles_of_4_bit_weights_multiply_bfloat16(
    kind: Any, group: int, rows: int, number: int, device: torch.device
) -> None:
    weight, meant = four_bits(kind, group, True, device, torch.bfloat16)
    outputs, warps, stages = SHAPES_OF_4_BITS[rows][number]
    tile = GroupedTile(outputs=outputs, block_k=128, warps=warps, stages=stages)
    experts = torch.randint(-1, EXPERTS, (300, 2), dtype=torch.int32, device=device)
    x = torch.randn(len(experts), meant.shape[2], device=device).bfloat16()
    bias = torch.randn(EXPERTS, meant.shape[1], device=device).bfloat16()
    found = grouped_matmul(
        x,
        weight,
        PairSorter(EXPERTS, 2, device)(experts, rows),
        rows,
        tile,
        dtype=torch.float32,
        top_k=2,
        gather=True,
        scatter=True,
        activation="swiglu_oai",
        bias=bias,
    )
    here = experts.flatten() >= 0
    expert = experts.flatten()[here].long()
    source = x.repeat_interleave(2, 0)[here].double()
    # As the kernel multiplies: in tiles of few rows with a scale per block, and of kind fp4, weights are exact.
    multiplied = meant.double() if group == 128 and rows <= MAX_ROWS_OF_SCALED_SUMS else meant.bfloat16().double()
    wanted = torch.einsum("pi,poi->po", source, multiplied[expert]) + bias[expert].double()
    wanted = gated_activation("swiglu_oai")(wanted)
    assert float((found[here] - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("case", ["int4 in groups of 128", "int4 in groups of 32, zero points", "fp4"])
def test_four_bits_are_dequantized_to_what_they_mean(case: str, device: torch.device) -> None:
    weight, meant = FORMATS[case](device)
    found = dequantize(weight, meant.shape[2], torch.float32)
    assert found.format == WeightFormat(kind="plain")
    assert torch.equal(found.values, meant)


@pytest.mark.parametrize("case", ["int8 per channel", "fp8 per channel", "fp8 blocks"])
@pytest.mark.parametrize("experts", [[2, 0, 5], [3, -1, 1]], ids=["all here", "one on another rank"])
def test_one_token_is_multiplied_by_what_quantized_weights_mean(
    case: str, experts: list[int], device: torch.device
) -> None:
    gate_up, gate_up_meant = FORMATS[case](device)
    down, down_meant = FORMATS[case](device)
    assert down.scales is not None
    scales = down.scales[:, :, :1].contiguous() if case == "fp8 blocks" else down.scales  # of the first 128 inputs
    down = evolve(down, values=down.values[:, :, :80].contiguous(), scales=scales)
    x, factors = torch.randn(1, 176, device=device), torch.rand(1, 3, device=device)
    tile = RowsTile(outputs=4, block_k=128, warps=4)
    found = experts_of_one_token(
        x,
        torch.tensor([experts], dtype=torch.int32, device=device),
        factors,
        gate_up,
        down,
        "silu",
        gate_up_tile=tile,
        down_tile=tile,
    )
    wanted = torch.zeros(160, device=device)
    for slot, expert in enumerate(experts):
        if expert >= 0:
            hidden = gated_activation("silu")(gate_up_meant[expert] @ x[0])
            wanted += factors[0, slot] * (down_meant[expert, :, :80] @ hidden)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("case", ["int8 per channel", "fp8 blocks"])
def test_quantized_activations_are_multiplied_with_their_scales(case: str, device: torch.device) -> None:
    weight, meant = FORMATS[case](device)
    experts = routing_of("experts of other ranks", device).experts
    pairs = PairSorter(EXPERTS, 2, device)(experts, 16)
    values = torch.randint(-8, 9, (len(experts), meant.shape[2]), device=device).float()
    per_block = weight.format.kind == "block"
    scales = torch.rand((len(experts), 2) if per_block else (len(experts),), device=device) + 0.5
    x = values * (scales.repeat_interleave(128, 1)[:, : meant.shape[2]] if per_block else scales[:, None])
    values = values.to(weight.values.dtype)
    tile = evolve(TILE, block_k=weight.format.block_k(TILE.block_k))
    settings: dict[str, Any] = {"dtype": torch.float32, "top_k": 2, "gather": True, "scatter": True}
    found = grouped_matmul(values, weight, pairs, 16, tile, x_scales=scales, **settings)
    for pair, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            torch.testing.assert_close(found[pair], meant[expert] @ x[pair // 2], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("per_block", [False, True], ids=["rows", "blocks"])
def test_activations_are_quantized_to_the_nearest(per_block: bool, device: torch.device) -> None:
    x = torch.randn(3, 176, device=device)
    x[1] = 0.0
    x[2, 3] = torch.nan
    values, scales = quantize_activations(x, torch.int8, per_block=per_block)
    spread = scales.repeat_interleave(128, 1)[:, :176] if per_block else scales[:, None]
    error = (values.float() * spread - x)[:2].abs()
    assert (error <= spread[:2] * 0.5001).all()
    assert scales[2].flatten()[0].isnan()
