"""The model and its optimizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.settings import VOCABULARY, Settings

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def build_model(dropout: float) -> LlamaForCausalLM:
    """A fresh model in float32, its residual branches scaled down with depth, with dropout while it trains."""
    config = LlamaConfig(**{**MODEL_CONFIG, "dtype": "float32"})  # attention is SDPA by default
    model = LlamaForCausalLM(config)
    branches = 2 * config.num_hidden_layers
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.weight.data.mul_(branches**-0.5)
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(functools.partial(drop_output, dropout))
    return model


def drop_output(probability: float, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """A forward hook: dropout on a module's output (Llama itself has dropout only in attention)."""
    return F.dropout(output, probability, module.training)


def make_optimizer(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
