"""The checkpoint's files, and the check that they are sound."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.conversations import CHAT_TEMPLATE, render_chat
from demo_model.model import MODEL_CONFIG
from demo_model.settings import END_OF_TEXT
from demo_model.sources import held_out_text

SIZE_LIMIT = 13_000_000  # bytes of model.safetensors

GENERATION_CONFIG = {"eos_token_id": [0, 2], "pad_token_id": 0}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    "eos_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}


def save_checkpoint(out: pathlib.Path, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write the weights in bfloat16, the shared embedding once, with the tokenizer and the configuration."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
        if name != "lm_head.weight"  # tied to model.embed_tokens.weight
    }
    (out / "model.safetensors").write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", MODEL_CONFIG)
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_checkpoint(directory: pathlib.Path) -> None:
    """Raise ValueError unless the checkpoint is small, complete and tokenizes as intended."""
    size = (directory / "model.safetensors").stat().st_size
    if size > SIZE_LIMIT:
        raise ValueError(f"model.safetensors has {size:,} bytes, and at most {SIZE_LIMIT:,} are allowed")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "  Hi\n"}]
    for prompt in (False, True):
        template = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        if template != render_chat(messages, prompt):
            raise ValueError(f"the chat template gives {template!r}, not what the model was trained on")
    for text in (held_out_text(), render_chat(messages), " \t\r\n\n\n  é 漢字 😀 don't ( x ) , .\x00  "):
        if tokenizer.decode(tokenizer.encode(text, verbose=False)) != text:
            raise ValueError(f"a text that begins with {text[:20]!r} changes when it is encoded and decoded")
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    problems = loaded[1]
    if any(problems.values()):
        raise ValueError(f"the checkpoint does not fit the model: {problems}")
