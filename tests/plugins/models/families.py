"""The native families, and how each is compared with transformers. docs/architectures.md has a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from engine.testing.checkpoints import OWN_WAYS, TINY

Form = Literal["gptq", "mxfp4"]
FORMS: Mapping[Form, str] = {"gptq": "GPTQ, 8 bits", "mxfp4": "MXFP4 experts"}
"""Quantized forms, and what the table calls them."""
RANKS = (1, 2, 4)
"""Numbers of ranks on which every family is compared. Two of four ranks share a KV head."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}


@frozen(kw_only=True)
class Family:
    """A native family under test."""

    plugin: str = ""
    """Name of its plugin. Empty: its model_type."""
    module: str = ""
    """Name of its module in plugins/models. Empty: that of the plugin."""
    config: Mapping[str, Any] = field(factory=dict)
    """Keys of config.json next to those of testing.checkpoints."""
    seed: int = 0
    """Of the weights. Chosen so that neither greedy tokens nor experts are decided by rounding."""
    form: Form = "gptq"
    """The quantized form in which it is compared, next to the unquantized one."""
    reads_images: bool = False
    """Whether the checkpoint has a vision tower, and the language model is under text_config."""
    reference: str = ""
    """The model_type that computes the same in transformers. Empty: transformers has the family itself."""
    renamed: Mapping[str, Any] = field(factory=dict)
    """Keys of config.json that differ from those of `reference`."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(config={"sliding_window": 24}),
    "ministral": Family(),
    "ministral3": Family(),
    "qwen2": Family(config={"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(plugin="gemma3"),
    "phi3": Family(),
    "olmo2": Family(seed=2),
    "olmo3": Family(),
    "granite": Family(),
    "smollm3": Family(),
    "glm4": Family(config={"attention_bias": True}, seed=2),
    "starcoder2": Family(),
    "cohere2": Family(),
    "mixtral": Family(config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}, seed=2),
    "qwen2_moe": Family(config={**EXPERTS, "shared_expert_intermediate_size": 48}, seed=2),
    "qwen3_moe": Family(config={**EXPERTS, "norm_topk_prob": True}),
    "gpt_oss": Family(
        config={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "intermediate_size": 128,  # a group of 32 for each of four ranks
        },
        seed=2,
        form="mxfp4",
    ),
    "gemma3": Family(
        plugin="gemma3-multimodal",
        module="text_tower",
        reads_images=True,
        config={
            "text_config": {**TINY, **OWN_WAYS["gemma3_text"], "tie_word_embeddings": True},
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": 510,
        },
    ),
    "mistral3": Family(
        module="text_tower",
        reads_images=True,
        config={
            "text_config": {**TINY, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "head_dim": 8, "image_size": 28, "patch_size": 14},
            "tie_word_embeddings": False,
        },
    ),
    "ministral3-multimodal": Family(
        module="text_tower",
        reads_images=True,
        reference="mistral3",
        config={
            "text_config": {**TINY, **OWN_WAYS["ministral3"], "model_type": "ministral3"},
            "vision_config": {**VISION, "head_dim": 8, "image_size": 28, "patch_size": 14},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": Family(
        plugin="qwen3-vl",
        module="text_tower",
        reads_images=True,
        config={
            "text_config": {**TINY, "rope_parameters": MROPE},
            "vision_config": {
                **VISION,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v2": Family(
        config={
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 0.01,  # the norm of latents has another
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.9,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 128,
            },
        },
        seed=1,
    ),
    "mimo": Family(
        reference="qwen2",
        renamed={"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
    ),
}
"""By model_type, or by plugin where two share a model_type."""
