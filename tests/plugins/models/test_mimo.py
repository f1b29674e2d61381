"""MiMo, which transformers lacks: the logits are those of Qwen2 with the same weights, whatever its MTP layers are."""

from __future__ import annotations

import json
from pathlib import Path

from engine.core.weights import Checkpoint
from engine.plugins.models.mimo import MiMo
from engine.plugins.models.qwen2 import Qwen2
from engine.testing.model_bench import ModelBench
from tests.plugins.speculators.mtp_reference import write_model
from tests.reference_tokens import greedy_reference

from .test_parity import PROMPT


def test_logits_with_mtp_layers_in_the_checkpoint_equal_those_of_qwen2_in_transformers(tmp_path: Path) -> None:
    write_model(tmp_path)
    expected = greedy_reference(tmp_path / "qwen2", PROMPT, 1).logits[: len(PROMPT)]
    logits = ModelBench(MiMo, tmp_path, [PROMPT]).prompt_logits(0)
    assert float((logits - expected).norm() / expected.norm()) < 1e-5


def test_every_key_of_a_checkpoint_is_known_and_other_models_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = Checkpoint.open(tmp_path).config
    assert MiMo.refuses(config) is None
    assert not MiMo.unknown_keys({**config, "auto_map": {}})
    assert "use_mrope: true" in str(MiMo.refuses({**config, "use_mrope": True}))
    qwen2 = json.loads((tmp_path / "qwen2" / "config.json").read_text())
    assert "this checkpoint is Qwen2ForCausalLM" in str(MiMo.refuses(qwen2))
    assert "this checkpoint is MiMoForCausalLM" in str(Qwen2.refuses(config))
