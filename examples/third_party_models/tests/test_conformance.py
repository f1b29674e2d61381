from typing import Any, ClassVar

from engine_third_party_models.gemma2 import Gemma2
from engine_third_party_models.qwen3_moe import Qwen3Moe

from engine.testing.models import ModelConformance


class TestGemma2(ModelConformance):
    model = Gemma2
    architecture = "gemma2"
    error = 1e-5


class TestQwen3Moe(ModelConformance):
    model = Qwen3Moe
    architecture = "qwen3_moe"
    config: ClassVar[dict[str, Any]] = {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    error = 1e-5
    rerouted = 0.1
