"""The built-in models keep their contract."""

from __future__ import annotations

from engine.plugins.models.llama import Llama
from engine.plugins.models.mistral import Mistral
from engine.plugins.models.qwen2 import Qwen2
from engine.plugins.models.qwen3 import Qwen3
from engine.testing.models import ModelConformance

BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"attention_bias": True, "tie_word_embeddings": True}
WINDOW = {"sliding_window": 24}
MIXED = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


class TestLlama(ModelConformance):
    model = Llama
    architecture = "llama"


class TestLlamaWithBiases(TestLlama):
    config = BIASES


class TestMistral(ModelConformance):
    model = Mistral
    architecture = "mistral"
    config = WINDOW


class TestQwen2(ModelConformance):
    model = Qwen2
    architecture = "qwen2"
    config = MIXED


class TestQwen3(ModelConformance):
    model = Qwen3
    architecture = "qwen3"
    config = TIED
