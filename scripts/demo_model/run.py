"""A whole run: from the standard library's files to a checked checkpoint with its card."""

from __future__ import annotations

import hashlib
import json
import pathlib
import platform
import random
import time
from dataclasses import asdict, fields, replace
from typing import Any

import tokenizers
import torch
import transformers

from demo_model.card import model_card
from demo_model.checkpoint import check_checkpoint, save_checkpoint, write_json
from demo_model.conversations import conversations
from demo_model.evaluation import evaluate_checkpoint, greedy_samples
from demo_model.model import build_model
from demo_model.settings import Settings
from demo_model.sources import HELD_OUT, held_out_text, shared_passages, training_sources
from demo_model.tokenizer import encode_documents, train_tokenizer
from demo_model.training import RESERVE, train


def build_demo(settings: Settings, out: pathlib.Path, device: torch.device) -> None:
    """Everything from the standard library's files to a checked checkpoint with its card."""
    deadline = time.monotonic() + 60 * settings.minutes - RESERVE
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rng = random.Random(settings.seed)

    sources = training_sources()
    chats = conversations(sources, settings.chat_share, rng)
    documents = [source.text for source in sources] + chats
    rng.shuffle(documents)
    tokenizer = train_tokenizer(documents)
    corpus = encode_documents(tokenizer, documents)
    text = held_out_text()[: settings.evaluation_length or None]
    held_out = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, device=device)
    data = {
        "files": len(sources),
        "source_bytes": sum(len(source.text.encode()) for source in sources),
        "conversations": len(chats),
        "chat_bytes": sum(len(chat.encode()) for chat in chats),
        "tokens": len(corpus.tokens),
        "sha256": hashlib.sha256("".join(documents).encode()).hexdigest(),
        "held_out_modules": HELD_OUT,
        "shared_passages": shared_passages(text, sources),
    }
    print(json.dumps(data, indent=2), flush=True)

    model: Any = build_model(settings.dropout)
    model.to(device)
    result = train(model, corpus, held_out, settings, device, deadline)

    save_checkpoint(out, result.weights, tokenizer)
    check_checkpoint(out)
    report = {
        "command": command_line(settings, result.steps),
        "settings": asdict(settings),
        "versions": versions(device),
        "data": data,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": (out / "model.safetensors").stat().st_size,
        "steps": result.steps,
        "seconds": result.seconds,
        "held_out": evaluate_checkpoint(out, text, device),
        "curve": [asdict(point) for point in result.curve],
    }
    write_json(out / "training.json", report)
    samples = greedy_samples(out, device)
    (out / "README.md").write_text(model_card(report, samples, result.curve), encoding="utf-8")
    for prompt, text in samples:
        print(f"\n=== {prompt!r}\n{prompt}{text}", flush=True)
    print(json.dumps(report["held_out"], indent=2))


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the run's software, and its device."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def command_line(settings: Settings, steps: int) -> str:
    """The command that repeats a run: its settings where they differ from the defaults, and the steps it made."""
    words = ["python scripts/train_demo.py"]
    repeated = replace(settings, steps=steps)
    for item in fields(repeated):
        value = getattr(repeated, item.name)
        if value != item.default:
            option = item.name.replace("_", "-")
            words.append(f"--{option}" if value is True else f"--{option} {value}")
    return " ".join(words)
