"""The quantization suite passes correct experts, and finds faulty ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.quant import ExpertsBias, Routing
from engine.plugins.quant.experts_by_linears import ExpertsByLinears
from tests.testing.quant_faults import Halved, Kernel, Method


class Experts(ExpertsByLinears):
    """Correct experts of halved weights. The faulty ones below change one thing each."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, Kernel)


class Unweighted(Experts):
    def apply(self, x: Any, routing: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, Routing(routing.experts, torch.ones_like(routing.weights)), weights, bias)


class FirstChoice(Experts):
    def apply(self, x: Any, routing: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, Routing(routing.experts[:, :1], routing.weights[:, :1]), weights, bias)


class Unbiased(Experts):
    def apply(self, x: Any, routing: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, routing, weights, None)


class GateBias(Experts):
    def apply(self, x: Any, routing: Any, weights: Any, bias: Any) -> Any:
        if bias is not None:
            bias = ExpertsBias(bias.gate_up, torch.zeros_like(bias.down))
        return super().apply(x, routing, weights, bias)


class OthersAreTheFirst(Experts):
    """Takes -1, an expert of another rank, for expert 0."""

    def apply(self, x: Any, routing: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, Routing(routing.experts.clamp(min=0), routing.weights), weights, bias)


class FirstRank(Experts):
    """Has the first experts on every rank."""

    def prepare(self, loaded: Any) -> Any:
        made = super().prepare(loaded)
        return made if self.spec.rank == 0 else {name: tensor * 0 for name, tensor in made.items()}


class Wide(Experts):
    def apply(self, *arguments: Any) -> Any:
        return super().apply(*arguments).double()


def suite_of(experts: type[Experts]) -> Any:
    method = type("Halving", (Method,), {"experts": lambda self, spec: experts(spec)})
    return type("Suite", (Halved,), {"method": method})()


def test_suite_passes_correct_experts(tmp_path: Path) -> None:
    suite = suite_of(Experts)
    suite.test_experts(tmp_path)
    suite.test_experts_on_ranks(tmp_path)


@pytest.mark.parametrize(
    ("experts", "test", "message"),
    [
        (Unweighted, "test_experts", "experts, 5 rows: relative error"),
        (FirstChoice, "test_experts", "experts, 5 rows: relative error"),
        (Unbiased, "test_experts", "experts, 5 rows: relative error"),
        (GateBias, "test_experts", "experts, 5 rows: relative error"),
        (Wide, "test_experts", "x is of torch.float32, the result of torch.float64"),
        (OthersAreTheFirst, "test_experts_on_ranks", "the sum over 2 ranks, by expert: relative error"),
        (FirstRank, "test_experts_on_ranks", "the sum over 2 ranks, by tensor: relative error"),
    ],
)
def test_suite_finds_faults(experts: type[Experts], test: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        getattr(suite_of(experts), test)(tmp_path)
