"""The native architectures under test."""

from __future__ import annotations

from engine.plugins.models.cohere2 import Cohere2
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.deepseek_v2 import DeepseekV2
from engine.plugins.models.gemma2 import Gemma2
from engine.plugins.models.gemma3 import Gemma3
from engine.plugins.models.glm4 import Glm4
from engine.plugins.models.gpt_oss import GptOss
from engine.plugins.models.granite import Granite
from engine.plugins.models.llama import Llama
from engine.plugins.models.ministral import Ministral
from engine.plugins.models.ministral3 import Ministral3
from engine.plugins.models.mistral import Mistral
from engine.plugins.models.mixtral import Mixtral
from engine.plugins.models.olmo2 import Olmo2
from engine.plugins.models.olmo3 import Olmo3
from engine.plugins.models.phi3 import Phi3
from engine.plugins.models.qwen2 import Qwen2
from engine.plugins.models.qwen2_moe import Qwen2Moe
from engine.plugins.models.qwen3 import Qwen3
from engine.plugins.models.qwen3_moe import Qwen3Moe
from engine.plugins.models.smollm3 import SmolLM3
from engine.plugins.models.starcoder2 import Starcoder2

PRE_NORM: dict[str, type[Decoder]] = {"llama": Llama, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3}
"""Those that read the usual keys alike."""
OTHERS: dict[str, type[Decoder]] = {
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
    "olmo2": Olmo2,
    "granite": Granite,
    "smollm3": SmolLM3,
    "glm4": Glm4,
    "olmo3": Olmo3,
    "ministral": Ministral,
    "ministral3": Ministral3,
    "starcoder2": Starcoder2,
    "cohere2": Cohere2,
}
MODELS = {**PRE_NORM, **OTHERS}
"""model_type -> class."""
SPARSE: dict[str, type[Decoder]] = {
    "mixtral": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "gpt_oss": GptOss,
    "deepseek_v2": DeepseekV2,
}
"""Those with experts."""
