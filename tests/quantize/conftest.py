"""Tiny checkpoints to quantize, and text to calibrate by."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.quantize.calibration import Calibration
from engine.testing.checkpoints import make_checkpoint

WORDS = "the cat sat on a mat while rain fell and old men told tales of ships that sailed to far lands"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped heads, sizes that groups of 32 divide."""
    path = tmp_path_factory.mktemp("plain") / "model"
    return make_checkpoint(
        path, tokenizer=True, num_hidden_layers=3, hidden_size=128, intermediate_size=192, head_dim=32
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    words = WORDS.split()
    choice = random.Random(0).choice
    file.write_text(" ".join(choice(words) for _ in range(3000)), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def calibration(text: Path) -> Calibration:
    return Calibration(files=(text,), samples=8, length=64)
