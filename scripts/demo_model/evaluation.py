"""The held-out loss, and samples of what a checkpoint writes."""

from __future__ import annotations

import contextlib
import hashlib
import math
import pathlib
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.conversations import render_chat

EVALUATION_CONTEXT, EVALUATION_STRIDE = 1024, 512

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef walk_files(",
    "class Stack:\n    def __init__(self",
    "def read_lines(path):\n    with open(",
    "# Count the words of a text.\nfrom collections import ",
)
CHAT_PROMPTS = ("Write the function posixpath.basename.", "Who are you?")
SAMPLE_TOKENS = 96


@torch.no_grad()
def sliding_loss(
    model: nn.Module,
    tokens: Tensor,
    precision: torch.autocast | None = None,
    context: int = EVALUATION_CONTEXT,
    stride: int = EVALUATION_STRIDE,
    rows: int = 16,
) -> float:
    """Mean loss in nats of all tokens but the first (`tokens: [n]`, on the model's device).

    Windows of `context` tokens move on by `stride`; each token counts once, in the first window that holds it, so that
    all but the first window's have at least `context - stride` tokens before them.
    """
    device = tokens.device
    overlap = context - stride
    count = len(range(0, max(1, len(tokens) - overlap), stride))
    positions = torch.arange(count, device=device)[:, None] * stride + torch.arange(context, device=device)
    windows = F.pad(tokens, (0, context + stride))[positions]  # [count, context]; the padding comes last, so is unseen
    scored = (positions < len(tokens)) & (torch.arange(context, device=device) >= overlap)
    scored[0] = (positions[0] > 0) & (positions[0] < len(tokens))
    model.eval()
    total = 0.0
    for window, mask in zip(torch.split(windows, rows), torch.split(scored, rows), strict=True):
        with precision or contextlib.nullcontext():
            logits = model(input_ids=window, use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        total += losses[mask[:, 1:].flatten()].double().sum().item()
    return total / int(scored.sum())


def load_checkpoint(directory: pathlib.Path, device: torch.device) -> tuple[Any, Any]:
    """The tokenizer, and the model in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(directory), model.to(device)


def evaluate_checkpoint(directory: pathlib.Path, text: str, device: torch.device) -> dict[str, Any]:
    """A checkpoint's perplexity on a text, in float32, with what is needed to compare it: text, context, stride."""
    tokenizer, model = load_checkpoint(directory, device)
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False), device=device)
    loss = sliding_loss(model, tokens)
    size = len(text.encode())
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss * (len(tokens) - 1) / math.log(2) / size,
        "tokens": len(tokens),
        "bytes": size,
        "context": EVALUATION_CONTEXT,
        "stride": EVALUATION_STRIDE,
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def greedy_samples(directory: pathlib.Path, device: torch.device) -> list[tuple[str, str]]:
    """Prompts and what the checkpoint writes after each, greedily."""
    tokenizer, model = load_checkpoint(directory, device)
    chats = [render_chat([{"role": "user", "content": content}], prompt=True) for content in CHAT_PROMPTS]
    samples = []
    for prompt in (*PROMPTS, *chats):
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
        inputs = torch.tensor([tokens], device=device)
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=SAMPLE_TOKENS, do_sample=False
        )
        samples.append((prompt, tokenizer.decode(output[0, len(tokens) :])))
    return samples
