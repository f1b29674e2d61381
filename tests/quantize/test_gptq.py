from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.errors import CheckpointError
from engine.quantize.awq import plain, relative_error
from engine.quantize.clipping import clip
from engine.quantize.gptq import gptq
from engine.quantize.grid import Grid, round_to_nearest

from .references import optimal_brain_quantization


def problem(outputs: int = 6, inputs: int = 48, tokens: int = 200, seed: int = 0) -> Any:
    """A weight, and the Hessian of inputs that go along with each other and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, 1, inputs, dtype=torch.float64)[torch.randperm(inputs, generator=generator)]
    x = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64) @ mixed * sizes
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    return weight.float(), x.T @ x / tokens


GRIDS = [Grid(bits=4, symmetric=symmetric, scale_dtype=torch.float32) for symmetric in (True, False)]


@pytest.mark.parametrize("grid", GRIDS, ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("act_order", "grouping"), [("none", "order"), ("weight", "neighbours"), ("group", "order")])
@pytest.mark.parametrize("size", [16, 48])
def test_each_value_is_nearest_to_what_the_formula_rounds(grid: Any, act_order: Any, grouping: Any, size: int) -> None:
    weight, hessian = problem()
    found = gptq(weight, hessian.float(), grid, size, act_order=act_order, damp=0.01)
    order = list(range(48))
    if act_order != "none":
        order = np.argsort(-np.diag(hessian.numpy()), kind="stable").tolist()
    bounds = [one.double().numpy() for one in clip(weight, hessian.float(), grid, size)]
    values = found.values.numpy().astype(np.float64)
    distances, numbers = optimal_brain_quantization(
        weight.numpy(), hessian.numpy(), grid.bits, size, grid.symmetric, 0.01, order, grouping, bounds, values
    )
    # Nearest, but for the rounding of float32 sums: a thousandth of a step, which differs from processor to processor.
    assert distances.max() < 0.501
    assert np.linalg.norm(plain(found, grid, size).numpy() - numbers) < 1e-4 * np.linalg.norm(numbers)
    if act_order == "group" and size < 48:
        assert found.group_of.tolist() == [order.index(j) // size for j in range(48)]
    else:
        assert found.group_of is None


@pytest.mark.parametrize("size", [16, 64, 128, -1])
def test_result_follows_the_formula_with_and_without_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of several blocks, and one block for all."""
    weight, hessian = problem(4, 256, 400)
    for block in (None, 256):
        if block is not None:
            monkeypatch.setattr("engine.quantize.gptq._block", lambda size: 256)
        found = gptq(weight, hessian.float(), GRIDS[0], size, act_order="none", damp=0.05)
        distances, _ = optimal_brain_quantization(
            weight.numpy(),
            hessian.numpy(),
            4,
            256 if size == -1 else size,
            True,
            0.05,
            list(range(256)),
            "order",
            None,
            found.values.numpy().astype(np.float64),
        )
        assert distances.max() < 0.501


@pytest.mark.parametrize("act_order", ["none", "weight", "group"])
def test_error_is_smaller_than_by_rounding(act_order: Any) -> None:
    weight, hessian = problem(32, 256, 1000)
    grid = GRIDS[0]
    errors = [
        relative_error(plain(one, grid, 64) - weight, weight, hessian.float())
        for one in (
            gptq(weight, hessian.float(), grid, 64, act_order=act_order, damp=0.01),
            round_to_nearest(weight, grid, 64),
        )
    ]
    assert errors[0] < 0.85 * errors[1]


def test_without_correlation_gptq_equals_rounding() -> None:
    weight, _ = problem()
    found = gptq(weight, torch.eye(48), GRIDS[0], 16, act_order="none", damp=0.01)
    assert torch.equal(found.values, round_to_nearest(weight, GRIDS[0], 16).values)


def test_inputs_that_are_always_zero_get_no_weight() -> None:
    weight, hessian = problem()
    hessian[:, 5] = hessian[5] = 0
    weight[:, 5] = 1e4
    found = plain(gptq(weight, hessian.float(), GRIDS[0], 16, act_order="weight", damp=0.01), GRIDS[0], 16)
    assert float(found[:, 5].abs().max()) == 0
    assert float((found - weight)[:, 6:].norm()) < float(weight[:, 6:].norm())


def test_hessian_with_nan_is_an_error() -> None:
    weight, hessian = problem()
    with pytest.raises(CheckpointError, match="positive definite"):
        gptq(weight, hessian.float() * float("nan"), GRIDS[0], 16, act_order="none", damp=0.01)
