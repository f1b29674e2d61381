"""Small configs of any architecture of transformers: its default config with small sizes in place of the large."""

from __future__ import annotations

import re
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 64, 4, 2, 16, 2, 24

SIZES: dict[str, Any] = {
    r"vocab_size|vocab_size_per_layer_input": 512,
    r"(n_positions|n_ctx|max_(position_embeddings|seq_len|sequence_length))|seq_length": 512,
    r"original_max_position_embeddings": 512,
    r"(hidden_size|n_embd|d_model|dim|hidden_dim|word_embed_proj_dim|embedding_size|emb_dim|embed_dim)": HIDDEN,
    r"hidden_size_per_layer_input": 16,
    r"(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|inner_dim|decoder_ffn_dim|dense_intermediate_size)": 96,
    r"(moe_|shared_expert_|shared_|expert_)\w*intermediate_size|expert_ffn_hidden_size": 32,
    r"num_hidden_layers|n_layers?|num_layers|decoder_layers": LAYERS,
    r"num_attention_heads|n_heads?|num_heads|decoder_attention_heads|num_global_attention_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|num_global_key_value_heads|n_head_kv|swa_num_key_value_heads": KV_HEADS,
    r"head_dim|attention_head_dim|kv_channels|swa_head_dim|head_size": HEAD_DIM,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_selected_experts|top_k|experts_per_token": 2,
    r"n_group|topk_group|num_expert_groups?|num_limited_groups": 1,
    r"n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"q_lora_rank": 32,
    r"kv_lora_rank": 16,
    r"qk_nope_head_dim|v_head_dim|swa_v_head_dim": HEAD_DIM,
    r"qk_rope_head_dim": 8,
    r"qk_head_dim": HEAD_DIM + 8,
    r"sliding_window|sliding_window_size|attention_window|local_attention|window_size": WINDOW,
    r"attention_chunk_size": 32,
    r"first_k_dense_replace|moe_layer_start_index|num_dense_layers": 1,
    r"(pad|bos|eos|sep|cls|decoder_start)_token_id": None,
    r"initializer_range": 0.2,
    r"query_pre_attn_scalar": HEAD_DIM,
    r"dim_model_base": 32,
    r"mup_base_width|attention_multiplier": ...,
    r"global_head_dim": 2 * HEAD_DIM,
    r"per_layer_config": {},
    r"num_nextn_predict_layers|num_mtp_modules|num_kv_shared_layers": 0,
    r"attention_dropout|hidden_dropout|resid_pdrop|embd_pdrop|attn_pdrop|dropout|activation_dropout": 0.0,
}
"""Pattern of a key's whole name -> its value; ...: as it is."""

FILLED = r".*token_id|num_key_value_heads|head_dim|num_experts_per_tok|topk_group|n_group|n_(routed|shared)_experts"
"""Keys that get a value although they are null by default."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "hrm_text": {"initializer_range": 0.02},  # a recurrence in depth, in which rounding grows
    "gemma4_text": {"per_layer_config": {1: {"head_dim": 2 * HEAD_DIM}}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
}
"""model_type -> keys that need other values."""


def tiny_config(model_type: str) -> Any:
    """transformers' config object of an architecture, with small sizes."""
    import transformers

    library: Any = transformers
    cls = library.CONFIG_MAPPING[model_type]
    made = _smaller(cls().to_dict(), OVERRIDES.get(model_type, {}))
    try:
        return cls(**made)
    except Exception:  # of a config class that wants numbers for special tokens
        return cls(**{key: 0 if key.endswith("token_id") else value for key, value in made.items()})


def _smaller(default: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config, and of the configs in it, with small sizes."""
    dropped = (
        "dtype",
        "rope_parameters",
        "transformers_version",
        "architectures",
        "model_type",
        "id2label",
        "label2id",
    )
    made = {key: _small(key, value) for key, value in default.items() if key not in dropped}
    if isinstance(default.get("layer_types"), list):
        kinds = list(dict.fromkeys(default["layer_types"]))
        made["layer_types"] = kinds if len(kinds) > 1 else kinds * LAYERS
        for key in made:
            if re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", key):
                made[key] = len(made["layer_types"])
    if default.get("is_decoder") is False:
        made["is_decoder"] = True
    if made.get("qk_rope_head_dim") and "head_dim" in made:
        made["head_dim"] = made["qk_rope_head_dim"]
    if made.get("kv_lora_rank") and made.get("num_key_value_heads"):
        made["num_key_value_heads"] = made["num_attention_heads"]
    layers = made.get("num_hidden_layers") or LAYERS
    for key, value in made.items():
        if isinstance(value, list) and key != "layer_types" and len(value) > layers and not isinstance(value[0], dict):
            made[key] = value[:layers]
        if isinstance(value, dict) and key.endswith("_config") and value:
            made[key] = {
                **_smaller(value, {}),
                **({"model_type": value["model_type"]} if "model_type" in value else {}),
            }
    made |= overrides
    return {key: value for key, value in made.items() if value is not None or key.endswith("token_id")}


def _small(key: str, value: Any) -> Any:
    """The value of a key in a small config."""
    for pattern, small in SIZES.items():
        if re.fullmatch(pattern, key) and small is not ...:
            if value is None and not re.fullmatch(FILLED, key):
                return None
            return small if not isinstance(value, list) or small is None else [small] * len(value)
    return value
