"""The built-in models keep their contract."""

from __future__ import annotations

from typing import Any

from engine.plugins.models.cohere2 import Cohere2
from engine.plugins.models.gemma2 import Gemma2
from engine.plugins.models.gemma3 import Gemma3
from engine.plugins.models.glm4 import Glm4
from engine.plugins.models.granite import Granite
from engine.plugins.models.llama import Llama
from engine.plugins.models.mistral import Mistral
from engine.plugins.models.olmo2 import Olmo2
from engine.plugins.models.olmo3 import Olmo3
from engine.plugins.models.phi3 import Phi3
from engine.plugins.models.qwen2 import Qwen2
from engine.plugins.models.qwen3 import Qwen3
from engine.plugins.models.smollm3 import SmolLM3
from engine.plugins.models.starcoder2 import Starcoder2
from engine.testing.models import ModelConformance

BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"attention_bias": True, "tie_word_embeddings": True}
WINDOW = {"sliding_window": 24}
MIXED = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


class Family(ModelConformance):
    """What families of the shared decoder differ in; classes that derive from the suite itself, and test_parity for
    several ranks, test the rest."""

    test_ranks: Any = None
    test_greedy: Any = None
    test_dummy_weights: Any = None
    test_every_tensor_counts: Any = None
    test_model_keeps_no_state_between_passes: Any = None


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


class TestGemma2(Family):
    model = Gemma2
    architecture = "gemma2"


class TestGemma3(ModelConformance):
    model = Gemma3
    architecture = "gemma3_text"


class TestPhi3(ModelConformance):
    model = Phi3
    architecture = "phi3"


class TestOlmo2(Family):
    model = Olmo2
    architecture = "olmo2"


class TestGranite(Family):
    model = Granite
    architecture = "granite"


class TestSmolLM3(Family):
    model = SmolLM3
    architecture = "smollm3"


class TestGlm4(Family):
    model = Glm4
    architecture = "glm4"


class TestOlmo3(Family):
    model = Olmo3
    architecture = "olmo3"


class TestStarcoder2(Family):
    model = Starcoder2
    architecture = "starcoder2"


class TestCohere2(ModelConformance):
    model = Cohere2
    architecture = "cohere2"
