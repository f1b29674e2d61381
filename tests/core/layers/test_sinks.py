"""Attention sinks of a checkpoint: read per rank, found by layer, and compared with the model's spec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.attention import AttentionSpec
from engine.core.errors import PluginError
from engine.core.layers import LayerFactory
from engine.core.layers.sinks import find_sinks
from engine.testing.ranks import LoneRank

SPEC = AttentionSpec(
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    scale=1.0,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=16,
    max_len=64,
    sliding_windows=(None,) * 3,
    sinks=(False, True, False),
)


def readers(*layers: int) -> Any:
    factory = LayerFactory(dtype="bfloat16", device="cpu", group=LoneRank(1, 2))
    for layer in layers:
        factory.attention(layer, 2, 1, 8, sinks=f"{layer}.sinks")
    return factory.sinks


def test_each_rank_reads_the_sinks_of_its_heads_in_float32() -> None:
    [reader] = readers(1)
    [(name, spec)] = reader.tensors().items()
    assert (name, spec.shape, spec.shard_dim) == ("1.sinks", (4,), 0)
    reader.fill({name: torch.tensor([1.0, 2.0], dtype=torch.bfloat16)})
    assert reader.weight.dtype == torch.float32
    found = find_sinks(SPEC, [reader], "the model")
    assert [None if one is None else one.tolist() for one in found] == [None, [1.0, 2.0], None]


def test_a_model_without_sinks_has_none_to_set() -> None:
    assert find_sinks(evolve(SPEC, sinks=()), [], "the model") == ()


@pytest.mark.parametrize(("layers", "said"), [((), r"\(no layer\)"), ((1, 2), r"\(1, 2\)")])
def test_sinks_in_other_layers_than_the_spec_names_are_an_error(layers: Any, said: str) -> None:
    made = readers(*layers)
    for reader in made:
        reader.weight = torch.zeros(2)
    with pytest.raises(PluginError, match=f"mine has made layers with attention sinks {said} .* sinks of its spec"):
        find_sinks(SPEC, made, "mine")
