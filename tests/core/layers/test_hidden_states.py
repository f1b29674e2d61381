"""HiddenStates: what enters the final norm, and what a factory knows of the checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch

from engine.core.layers import LayerFactory
from engine.core.layers.hidden_states import HiddenStates


def factory(states: HiddenStates | None = None, stored: tuple[str, ...] | None = None) -> LayerFactory:
    return LayerFactory(dtype="float32", device="cpu", hidden_states=states, stored=stored)


def hidden_states(*layers: int) -> HiddenStates:
    return HiddenStates(layers, 4, max_rows=3, dtype=torch.float32, device="cpu")


def test_final_norm_stores_the_sum_that_enters_it() -> None:
    states = hidden_states(1, 2)
    layers = factory(states)
    norm = layers.final_norm("norm", 4, 1e-6, num_layers=2)
    assert states.missing == {1}
    assert layers.last_norm is layers.layers[0]
    layers.layers[0].fill({"norm.weight": torch.full((4,), 2.0)})
    hidden, residual = torch.randn(2, 4), torch.randn(2, 4)
    total = hidden + residual
    normed, returned = norm(hidden, residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (4,), torch.full((4,), 2.0), 1e-6))
    torch.testing.assert_close(returned, total)
    torch.testing.assert_close(states.rows(2), torch.cat((torch.zeros(2, 4), total), 1))


@pytest.mark.parametrize("states", [None, hidden_states(0, 1)], ids=["none", "of other layers"])
def test_final_norm_is_a_plain_norm_where_its_input_is_not_wanted(states: HiddenStates | None) -> None:
    layers = factory(states)
    assert layers.final_norm("norm", 4, 1e-6, num_layers=2) is layers.layers[0]


def test_factory_says_which_tensors_are_stored() -> None:
    layers = factory(stored=("fc.weight", "fc.bias", "proj.weight"))
    assert layers.stores_tensor("fc.bias") is True
    assert layers.stores_tensor("proj.bias") is False
    assert factory().stores_tensor("fc.bias") is None
