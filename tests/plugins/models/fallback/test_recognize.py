"""Modules are recognized only if they compute the engine's layers for inputs of every size and at every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.plugins.models.fallback.head import Head
from engine.plugins.models.fallback.recognize import find_gated, find_norms
from engine.plugins.models.fallback.trace import Blueprint

LIMITS = (0.5, 3.0, 7.0, 10.0, 16.0, 100.0, 5000.0)
HIDDEN, WIDE, VOCAB = 64, 96, 32
BLUEPRINT = Blueprint(
    calls=(),
    linears=frozenset(),
    siblings=(("mlp.gate", "mlp.up"),),
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    max_len=512,
    waits=None,
    experts=False,
)


def limited(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    return x if limit is None else x.clamp(-limit, limit)


class GatedMLP(nn.Module):
    """A gated MLP with limits on what its linear modules return."""

    def __init__(self, **limits: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self._limits = limits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = limited(self.gate(x), self._limits.get("gate")), limited(self.up(x), self._limits.get("up"))
        return limited(self.down(F.silu(gate) * up), self._limits.get("down"))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("place", ["gate", "up", "down"])
def test_a_gated_mlp_is_not_recognized_with_a_limit(place: str, limit: float) -> None:
    assert [*find_gated(nn.ModuleDict({"mlp": GatedMLP()}), BLUEPRINT)] == ["mlp"]
    assert find_gated(nn.ModuleDict({"mlp": GatedMLP(**{place: limit})}), BLUEPRINT) == {}


class Norm(nn.Module):
    """An RMS norm with a limit on its input, or with its epsilon added to the root."""

    def __init__(self, limit: float | None = None, *, adds_to_root: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.eps = 1e-6
        self._limit = limit
        self._adds_to_root = adds_to_root

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = limited(x, self._limit)
        if self._adds_to_root:
            return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_norm_is_not_recognized_with_a_limit(limit: float) -> None:
    assert [*find_norms(nn.ModuleDict({"plain": Norm(), "limited": Norm(limit)}))] == ["plain"]


def test_a_norm_is_not_recognized_with_its_epsilon_in_another_place() -> None:
    assert [*find_norms(nn.ModuleDict({"plain": Norm(), "other": Norm(adds_to_root=True)}))] == ["plain"]


class LanguageModel(nn.Module):
    """An output layer over a decoder, with a limit on the logits."""

    base_model_prefix = "model"

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.model = nn.Identity()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self._limit = limit

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, **given: Any) -> Any:
        result = self.model(**given)
        result.logits = limited(self.lm_head(result.last_hidden_state), self._limit)
        return result


@pytest.mark.parametrize("limit", [None, *LIMITS])
def test_logits_are_those_of_the_output_layer_alone_without_a_limit(limit: float | None) -> None:
    model = LanguageModel(limit)
    module: Any = model.lm_head
    module.bias = None
    layer: Any = None
    assert Head(model, "lm_head", module, layer, BLUEPRINT).is_plain == (limit is None)
