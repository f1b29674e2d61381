"""Tiny random checkpoints of architectures that bend the fallback differently."""

from __future__ import annotations

from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "cohere2": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "logit_scale": 0.5,
    },
    "minicpm3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 32,
        "sliding_window": 24,
    },
    "olmo": {"clip_qkv": 8.0, "initializer_range": 2.0},
    "ministral3": {},
}
"""model_type -> keys of config.json. Fused projections with biases and partial rotation; two kinds of layers, one
without rotation, and scaled logits; values narrower than keys; experts and multipliers; gated attention, which views
what the attention function returns; queries, keys and values limited to 8; queries that grow from position 16 on."""
