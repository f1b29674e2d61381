"""The native families, and how each is compared with transformers. docs/architectures.md has a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

Form = Literal["gptq", "mxfp4"]
FORMS: Mapping[Form, str] = {"gptq": "GPTQ, 8 bits", "mxfp4": "MXFP4 experts"}
"""Quantized forms, and what the table calls them."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@frozen(kw_only=True)
class Family:
    """A native family under test."""

    plugin: str = ""
    """Name of its plugin and of its module. Empty: its model_type."""
    config: Mapping[str, Any] = field(factory=dict)
    """Keys of config.json next to those of testing.checkpoints."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Four share the two KV heads: a head, and its norm, is on two of them."""
    form: Form = "gptq"
    """The quantized form in which it is compared, next to the unquantized one."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(config={"sliding_window": 24}),
    "ministral": Family(),
    "qwen2": Family(config={"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(plugin="gemma3"),
    "phi3": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "granite": Family(),
    "smollm3": Family(),
    "glm4": Family(),
    "starcoder2": Family(),
    "cohere2": Family(),
    "mixtral": Family(config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2_moe": Family(config={**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": Family(config={**EXPERTS, "norm_topk_prob": True}),
    "gpt_oss": Family(
        config={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "intermediate_size": 128,  # a group of 32 for each of four ranks
        },
        form="mxfp4",
    ),
}
"""By model_type."""
