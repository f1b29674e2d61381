"""The script that trains EAGLE-3 heads: it computes what the engine computes, and the engine loads what it writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint
from tests.plugins.speculators.decoder_reference import LAYER_CONFIG
from tests.plugins.speculators.eagle3_reference import Reference, write_heads

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("train_draft")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", tokenizer=True, num_hidden_layers=8)


@torch.inference_mode()
def test_heads_compute_what_the_reference_computes(script: Any, target: Path, tmp_path: Path) -> None:
    """Also for the second token of the proposals that begin at each row."""
    tensors = write_heads(tmp_path)
    reference = Reference(target, tensors)
    heads = script.Heads({**LAYER_CONFIG, "draft_vocab_size": 200})
    heads.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    tokens = [(11 * place) % 512 for place in range(12)]
    hidden = reference.inputs(tokens[:10])
    table = reference.target.embedding[torch.tensor([tokens])]
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    first = heads(hidden[None], table[:, 1:11], 0, cache)
    assert_close(first[0], reference.outputs(hidden, tokens[1:11]))
    second = heads(first, table[:, 2:12], 1, cache)
    for row in range(10):
        rows = torch.cat((hidden[: row + 1], first[0, row : row + 1]))
        following = [*tokens[1 : row + 2], tokens[row + 2]]
        assert_close(second[0, row], reference.outputs(rows, following)[-1])


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).norm() / wanted.norm() < 1e-5


def test_engine_loads_what_the_script_writes(script: Any, target: Path, tmp_path: Path) -> None:
    options = script.parse_arguments(["--smoke", "--target", str(target), "--out", str(tmp_path)])
    right = script.train(options)
    assert len(right) == 3
    assert all(0 <= share <= 1 for share in right)
    usual: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "8MiB", "model__dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with Engine(target, **usual) as engine:
        [alone] = engine.generate(["def read"], params)
    drafts = {"speculator": "eagle3", "speculator__model": str(tmp_path), "speculator__length": "fixed"}
    with Engine(target, **drafts, **usual) as engine:
        [done] = engine.generate(["def read"], params)
        stats = engine.stats().speculation
    assert done.token_ids == alone.token_ids
    assert stats is not None
    assert sum(stats.verified) > 0
