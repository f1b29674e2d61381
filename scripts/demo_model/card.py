"""The model card: README.md of the checkpoint."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

from demo_model.evaluation import SAMPLE_TOKENS
from demo_model.model import MODEL_CONFIG
from demo_model.settings import REPOSITORY, VOCABULARY
from demo_model.sources import HELD_OUT
from demo_model.training import CurvePoint

CARD_TEMPLATE = REPOSITORY / "demo" / "MODEL_CARD.md.in"


def curve_table(curve: Sequence[CurvePoint], rows: int = 10) -> str:
    """The curve as a Markdown table of about this many rows, the last point and the best one included."""
    best = min(curve, key=lambda point: point.held_out_loss)
    spacing = math.ceil(len(curve) / rows)
    shown = [point for i, point in enumerate(curve) if i % spacing == 0 or point in (best, curve[-1])]
    lines = ["| step | epoch | training loss | held-out loss | held-out perplexity |", "| --- " * 5 + "|"]
    for point in shown:
        cells = (f"{point.epoch:.1f}", f"{point.loss:.3f}", f"{point.held_out_loss:.3f}")
        mark = " (kept)" if point is best else ""
        lines.append(f"| {point.step} | {' | '.join(cells)} | {math.exp(point.held_out_loss):.2f}{mark} |")
    return "\n".join(lines)


def sample_blocks(samples: Sequence[tuple[str, str]]) -> str:
    """The samples as Markdown; four backquotes, since a chat answer has blocks of three."""
    blocks = [f"Prompt:\n````text\n{prompt}\n````\nCompletion:\n````text\n{text}\n````" for prompt, text in samples]
    return "\n\n".join(blocks)


def model_card(report: dict[str, Any], samples: Sequence[tuple[str, str]], curve: Sequence[CurvePoint]) -> str:
    """README.md of the checkpoint, from the template next to the package."""
    settings, data, held_out = report["settings"], report["data"], report["held_out"]
    values = {
        "parameters": f"{report['parameters'] / 1e6:.1f} M",
        "train_minutes": f"{report['seconds'] / 60:.1f}",
        "device": report["versions"]["device"],
        "layers": MODEL_CONFIG["num_hidden_layers"],
        "hidden": MODEL_CONFIG["hidden_size"],
        "heads": MODEL_CONFIG["num_attention_heads"],
        "kv_heads": MODEL_CONFIG["num_key_value_heads"],
        "head_dim": MODEL_CONFIG["head_dim"],
        "ffn": MODEL_CONFIG["intermediate_size"],
        "vocabulary": f"{VOCABULARY:,}",
        "positions": f"{MODEL_CONFIG['max_position_embeddings']:,}",
        "megabytes": f"{report['bytes'] / 1e6:.1f}",
        "files": data["files"],
        "source_megabytes": f"{data['source_bytes'] / 1e6:.1f}",
        "python": report["versions"]["python"],
        "chat_percent": f"{100 * data['chat_bytes'] / (data['chat_bytes'] + data['source_bytes']):.0f}%",
        "tokens": f"{data['tokens']:,}",
        "held_out": ", ".join(f"`{name}`" for name in HELD_OUT),
        "shared_percent": f"{100 * data['shared_passages']:.2f}%",
        "context": held_out["context"],
        "stride": held_out["stride"],
        "held_tokens": f"{held_out['tokens']:,}",
        "perplexity": f"{held_out['perplexity']:.2f}",
        "bits_per_byte": f"{held_out['bits_per_byte']:.3f}",
        "held_sha": held_out["sha256"],
        "evaluations": len(curve),
        "steps": f"{report['steps']:,}",
        "batch_tokens": f"{settings['batch'] * settings['context']:,}",
        "epochs": f"{curve[-1].epoch:.1f}",
        "learning_rate": settings["learning_rate"],
        "weight_decay": settings["weight_decay"],
        "dropout": settings["dropout"],
        "arithmetic": "float32" if report["versions"]["device"] == "CPU" else "bfloat16 autocast",
        "seed": settings["seed"],
        "curve": curve_table(curve),
        "sample_tokens": SAMPLE_TOKENS,
        "samples": sample_blocks(samples),
        "command": report["command"],
    }
    return string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(values)
