"""Writes model directories without weights, for --load-format dummy: config.json, and a tokenizer for servers.

    python benchmarks/models.py DIRECTORY [NAME ...]

Sizes are those of the published models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}

QWEN3_SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

LLAMA_1B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": LLAMA_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}

QWEN3_4B: dict[str, Any] = QWEN3_SMALL | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}

QWEN3_MOE: dict[str, Any] = QWEN3_SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_window_layers": 48,
}

QWEN3_8B: dict[str, Any] = QWEN3_SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "max_window_layers": 36,
}

GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

GEMMA3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "bos_token_id": 2,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "bos_token_id": 199998,
    "eos_token_id": 200002,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}

TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_scaling": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "type": "int",
                "symmetric": True,
                "dynamic": False,
                "num_bits": 4,
                "strategy": "group",
                "group_size": 128,
            },
            "input_activations": None,
        }
    },
}
"""quantization_config of compressed-tensors for all linear layers except the LM head."""

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_SMALL,
    "qwen3-0.6b-w4a16": QWEN3_SMALL | {"quantization_config": W4A16},
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_MOE,
    "gemma-2-9b": GEMMA2_9B,
    "gemma-3-12b": GEMMA3_12B,
    "gpt-oss-20b": GPT_OSS,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "llama-3.2-1b": LLAMA_1B,
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-8b-w4a16": LLAMA_8B | {"quantization_config": W4A16},
    "tiny": TINY,
}

LINEARS = {
    "llama-3.1-8b": {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen3-0.6b": {"qkv": (4096, 1024), "output": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
"""The linear layers of a decoder block, merged as in the engine: rows of W, inputs."""


def write_model(root: Path, name: str, *, tokenizer: bool = False) -> Path:
    """Write one of MODELS below `root`. Returns its directory."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer:
        _write_tokenizer(directory, config)
    return directory


def _write_tokenizer(directory: Path, config: dict[str, Any]) -> None:
    """A byte tokenizer, padded with artificial words to the model's vocabulary, so that every token has a text."""
    write_tokenizer(directory, [f"token{number} " for number in range(256, config["vocab_size"])])


def write_tokenizer(directory: Path, words: Sequence[str]) -> None:
    """A tokenizer of 256 bytes and these words of ASCII, all different and longer than a byte; the last one ends a
    sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "Ġ") for word in words]  # Ġ: a byte-level blank
    vocabulary = {text: number for number, text in enumerate([*symbols, *words])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=words[-1]).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    arguments = parser.parse_args()
    for name in arguments.names or MODELS:
        print(write_model(arguments.directory, name, tokenizer=True))


if __name__ == "__main__":
    main()
