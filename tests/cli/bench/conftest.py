from __future__ import annotations

from pathlib import Path

import pytest

from engine.testing.checkpoints import make_checkpoint

SMALL = ("--kv-memory", "8MiB", "--device", "cpu", "--threads", "1")
CEILINGS = ("--bandwidth", "0.01", "--matmul", "0.1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "llama", tokenizer=True)


@pytest.fixture
def flags(tiny: Path) -> list[str]:
    """Options of an engine that starts quickly, and ceilings that need no measurement."""
    return ["--model", str(tiny), *SMALL, *CEILINGS]
