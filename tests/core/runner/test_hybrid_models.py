"""A model that has layers with a state and layers with a KV cache, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.layers import LayerFactory
from engine.core.types import Request
from engine.testing.models import ModelConformance
from tests.core.runner import state_models
from tests.core.runner.replays import ReplayByRunning
from tests.core.runner.state_models import Hybrid
from tests.core.runner.test_cuda_graphs import FixedAttention
from tests.core.runner.test_state_models import GREEDY, PROMPTS, TIGHT, Tokens, reference, tokens_of

BLOCK = 4 * 2 * 2 * 2 * 8 * 4
"""Bytes of a block: tokens, layers, keys and values, heads, size of a head, float32."""
SETTINGS = {
    "model__load_format": "dummy",
    "model__name": "hybrid",
    "model__max_len": 64,
    "cache__block_size": 4,
    "cache__memory": f"{16 * BLOCK}B",
    **TIGHT,
}


@pytest.fixture(scope="module")
def expected() -> Tokens:
    found = reference(Hybrid)
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize(("policy", "overlap"), [("fcfs", "on"), ("multi_step", "off"), ("priority", "on")])
def test_sequences_of_a_hybrid_that_are_preempted_for_blocks_compute_their_states_again(
    make_engine: Any, expected: Tokens, policy: str, overlap: str
) -> None:
    engine = make_engine(state_models, **SETTINGS, scheduler__overlap=overlap, scheduler=policy)
    assert engine.cache_info.num_blocks == 16
    numbers = [1, 1, 5, 1, 0, 2]
    found = engine.generate([PROMPTS[number] for number in numbers], GREEDY)
    assert [one.token_ids for one in found] == [expected[number] for number in numbers]
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hits == 0, "a prefix was reused, of which there are blocks but no states"


def test_replays_of_a_hybrid_advance_states_and_write_keys(
    make_engine: Any, expected: Tokens, replays: type[ReplayByRunning]
) -> None:
    engine = make_engine(state_models, **SETTINGS, executor__graphs="decode", attention=FixedAttention)
    engine.add(Request(id="aborted", prompt=tuple(PROMPTS[0]), params=GREEDY))
    engine.step()
    engine.abort("aborted")
    assert tokens_of(engine) == expected
    assert {kind for kind, *_ in engine.stats().graph_replays} == {"decode"}


class Conformance(ModelConformance):
    """The hybrid with weights from a file, which ranks shard."""

    model = Hybrid
    ranks = (2,)

    def checkpoint(self, directory: Path) -> Path:
        layers, draw = LayerFactory(dtype="float32", device="cpu"), torch.Generator().manual_seed(0)
        Hybrid({}, layers)
        shapes = {name: spec.shape for layer in layers.layers for name, spec in layer.tensors().items()}
        tensors = {name: torch.randn(shape, generator=draw) * 0.5 for name, shape in shapes.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text("{}")
        return directory


def test_ranks_shard_states_and_keep_whole_what_is_replicated(tmp_path: Path) -> None:
    Conformance().test_ranks(tmp_path, 0)
    Conformance().test_batches(tmp_path)
