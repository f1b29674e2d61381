"""What a training run may vary, and what its parts share."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
VOCABULARY = 4096


def setting(default: Any, description: str) -> Any:
    """A field of Settings: its default, and the help text of its command-line option."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Settings:
    """Everything that shapes a training run; each field is a command-line option."""

    seed: int = setting(0, "seed of the data order, the conversations and the weights")
    minutes: float = setting(8.0, "time limit of the whole run; steps are cut to fit once the speed is known")
    epochs: float = setting(32.0, "passes over the training tokens, unless --steps is given")
    steps: int = setting(0, "optimizer steps; 0: as many as --epochs asks for")
    batch: int = setting(16, "windows of --context tokens in a step")
    context: int = setting(1024, "tokens in a window; every fourth step has half as many windows of twice the length")
    learning_rate: float = setting(3e-3, "peak learning rate")
    weight_decay: float = setting(1.0, "weight decay of the matrices")
    dropout: float = setting(0.25, "dropout after the embedding and in front of each residual sum")
    warmup: float = setting(0.04, "share of the steps in which the learning rate rises")
    aligned: float = setting(0.25, "share of the windows that begin where a document begins")
    chat_share: float = setting(0.12, "share of the training bytes that are conversations")
    evaluations: int = setting(40, "held-out evaluations during training")
    evaluation_length: int = setting(0, "characters of the held-out text to evaluate on; 0: all")
    compile: bool = setting(False, "compile the model with torch.compile")


SMOKE = Settings(minutes=2.0, steps=8, batch=2, context=128, evaluations=2, evaluation_length=8000, learning_rate=1e-3)
