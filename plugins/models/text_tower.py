"""The language models of checkpoints that also read images: Gemma 3, Mistral Small 3.1 and 3.2, Ministral 3, Qwen3-VL.

The language model is loaded alone, and computes what the whole model computes for text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve

from engine.core.layers import LayerFactory
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.decoder_config import DecoderConfig, with_theta
from engine.plugins.models.gemma3 import Gemma3
from engine.plugins.models.ministral3 import Ministral3
from engine.plugins.models.mistral import Mistral
from engine.plugins.models.qwen3 import Qwen3

PREFIX, FORMER_PREFIX = "model.language_model.", "language_model.model."
"""Of the names of the language model's tensors, now and in older checkpoints."""
IMAGES = ("vision_tower.*", "multi_modal_projector.*", "visual.*")
"""Names of the tensors that read images, which may also begin with "model."."""
SHARED_KEYS = ("architectures", "dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
"""Keys next to text_config that concern the language model, if they are there."""
IMAGE_KEYS = {
    "boi_token_index",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "text_config",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_start_token_id",
}
"""Keys next to text_config that concern images, and text_config."""


class TextTower(Decoder):
    """Mixin of a language model within a larger one: placed before its class, builds the model from text_config."""

    text_type: ClassVar[str]
    """The model_type of text_config."""
    implied_type: ClassVar[str] = ""
    """The model_type that a text_config without one has. Empty: text_type."""
    defaults: ClassVar[Mapping[str, Any]]
    """Values of keys that text_config may lack: transformers writes only those that differ from its own class's."""
    tied: ClassVar[bool]
    """Whether a file without tie_word_embeddings means a tied LM head."""

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        text = config.get("text_config")
        refusal = super().refuses({**config, "text_config": text or {}})
        if refusal is not None:
            return refusal
        if not isinstance(text, Mapping):
            return "config.json lacks text_config, the table of the language model; fetch it again"
        kind = text.get("model_type") or cls.implied_type or cls.text_type
        if kind != cls.text_type:
            return (
                f"the language model of config.json (text_config.model_type) is {kind!r}, and this computes"
                f" {cls.architecture} with {cls.text_type!r}"
            )
        return None

    @classmethod
    def unknown_keys(cls, config: Mapping[str, Any]) -> Sequence[str]:
        others = {key: value for key, value in config.items() if key not in IMAGE_KEYS}
        return sorted({*cls.keys.unknown(others), *super().unknown_keys(config)})

    @classmethod
    def normalized(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """text_config with the defaults, and the SHARED_KEYS next to it."""
        shared = {key: config[key] for key in SHARED_KEYS if key in config}
        return super().normalized({"tie_word_embeddings": cls.tied, **cls.defaults, **config["text_config"], **shared})

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return evolve(super().parse(config), prefix=PREFIX)

    @classmethod
    def prepare(cls, layers: LayerFactory) -> None:
        layers.accept_prefix(PREFIX, FORMER_PREFIX)
        layers.accept_prefix("lm_head.", "language_model.lm_head.")
        for pattern in IMAGES:
            layers.ignore(pattern)
            layers.ignore(f"model.{pattern}")


class Gemma3Text(TextTower, Gemma3):
    """Gemma 3 without its vision tower."""

    architecture: ClassVar[str] = "Gemma3ForConditionalGeneration"
    model_type: ClassVar[str] = "gemma3"
    text_type: ClassVar[str] = "gemma3_text"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
    }
    tied: ClassVar[bool] = True


class Mistral3Text(TextTower, Mistral):
    """Mistral Small 3.1 and 3.2 without their vision tower."""

    architecture: ClassVar[str] = "Mistral3ForConditionalGeneration"
    model_type: ClassVar[str] = "mistral3"
    text_type: ClassVar[str] = "mistral"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    }
    tied: ClassVar[bool] = False


class Ministral3Text(TextTower, Ministral3):
    """Ministral 3 and Devstral 2 without their vision tower."""

    architecture: ClassVar[str] = "Mistral3ForConditionalGeneration"
    model_type: ClassVar[str] = "mistral3"
    text_type: ClassVar[str] = "ministral3"
    implied_type: ClassVar[str] = "mistral"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    }
    tied: ClassVar[bool] = False


class Qwen3VLText(TextTower, Qwen3):
    """Qwen3-VL, the dense models, without their vision tower. The positions of text are those of a plain rotation."""

    architecture: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen3_vl"
    text_type: ClassVar[str] = "qwen3_vl_text"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
    }
    tied: ClassVar[bool] = False

    @classmethod
    def normalized(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without the sections of the rotation by time, height and width, which text has in common."""
        config = dict(super().normalized(config))
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(config.get(name), Mapping):
                config[name] = {key: value for key, value in config[name].items() if not key.startswith("mrope_")}
        return with_theta(config, 500000.0)
