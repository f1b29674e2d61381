"""MiMo, which transformers lacks: the logits are those of Qwen2 with the same weights, whatever its MTP layers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.core.distributed import RankGroup
from engine.core.weights import Checkpoint
from engine.plugins.models.mimo import MiMo
from engine.plugins.models.qwen2 import Qwen2
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks
from tests.plugins.speculators.mtp_reference import write_model
from tests.reference_tokens import logits_and_greedy_tokens

from .test_parity import PROMPT, STEPS, logits_and_choices


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_and_greedy_tokens_equal_those_of_qwen2_in_transformers(tmp_path: Path, ranks: int) -> None:
    write_model(tmp_path)
    expected, tokens = logits_and_greedy_tokens(tmp_path / "qwen2", PROMPT, STEPS)

    def work(group: RankGroup) -> tuple[torch.Tensor, list[int]]:
        return logits_and_choices(ModelBench(MiMo, tmp_path, [[*PROMPT, *tokens]], group=group))

    for logits, choices in run_ranks(ranks, work):
        assert float((logits - expected).norm() / expected.norm()) < 1e-5
        assert choices == tokens


def test_every_key_of_a_checkpoint_is_known_and_other_models_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = Checkpoint.open(tmp_path).config
    assert MiMo.refuses(config) is None
    assert not MiMo.unknown_keys({**config, "auto_map": {}})
    assert "use_mrope: true" in str(MiMo.refuses({**config, "use_mrope": True}))
    qwen2 = json.loads((tmp_path / "qwen2" / "config.json").read_text())
    assert "this checkpoint is Qwen2ForCausalLM" in str(MiMo.refuses(qwen2))
    assert "this checkpoint is MiMoForCausalLM" in str(Qwen2.refuses(config))
