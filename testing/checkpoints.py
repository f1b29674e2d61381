"""Tiny random checkpoints of every built-in architecture, for tests of models, engines and servers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""config.json of a small model. Its weights are large, so that attention is uneven and errors show in the logits."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 7.0],
    "partial_rotary_factor": 0.5,
    "attention_factor": 1.3,
}
"""The short factors apply if the longest context served is at most original_max_position_embeddings."""
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Queries grow from position 16 on."""
OWN_WAYS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 20, "sliding_window": 24},
    "gemma3_text": {
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "sliding_window": 40},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "attention_bias": True,
    },
    "olmo3": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "ministral": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"rope_parameters": GROWING},
    "starcoder2": {"sliding_window": 24, "hidden_act": "gelu_pytorch_tanh"},
    "cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.3},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 24},
}
"""model_type -> keys of config.json, added to TINY, that exercise what is particular to the architecture."""

LETTERS = "etaoinshrdlucmfw"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    directory: str | Path,
    architecture: str = "llama",
    *,
    tokenizer: bool = False,
    seed: int = 0,
    shards: bool = False,
    stacked: bool = False,
    **config: Any,
) -> Path:
    """Write a tiny random float32 checkpoint with transformers' save_pretrained, and return its directory.

    architecture: llama, mistral, qwen2, qwen3 or any other model_type that transformers knows.
    tokenizer: also write a tokenizer of 512 tokens (256 bytes, pairs of letters, special tokens) with a chat template;
        <|endoftext|> is then the end-of-sequence token.
    shards: write several safetensors files and an index instead of one file.
    stacked: write all experts of a layer in two tensors, one of gate and up and one of down, as transformers has them.
    config: keys of config.json that differ from `TINY` and `OWN_WAYS`, rope_parameters or the older rope_scaling
        included.
    """
    import torch
    import transformers

    target = Path(directory)
    special = {"eos_token_id": TINY["vocab_size"] - len(SPECIAL_TOKENS)} if tokenizer else {}
    library: Any = transformers  # has no type annotations
    own = OWN_WAYS.get(architecture, {})
    built = library.AutoConfig.for_model(architecture, **{**TINY, **own, **special, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide errors
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(target, max_shard_size="100KB" if shards else "50GB", save_original_format=not stacked)
    if tokenizer:
        _write_tokenizer(target)
    return target


def _write_tokenizer(directory: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    every_pair = ((first, second) for first in LETTERS for second in LETTERS)
    pairs = list(islice(every_pair, TINY["vocab_size"] - 256 - len(SPECIAL_TOKENS)))
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in pairs)]
    raw = Tokenizer(models.BPE(vocab={symbol: token for token, symbol in enumerate(symbols)}, merges=pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    library: Any = transformers  # has no type annotations
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
