"""Random weights of a model whose next token is known: for benchmarks that need right and wrong drafts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from engine.core.weights import DummySource

WORKERS = Path(__file__).parent / "predictable_workers"


def make_predictable() -> None:
    """Random weights, here and in workers started later, whose next token after t is t + 1: a large embedding passes
    through all layers nearly unchanged, and the rows of the LM head are those of the embedding, one further.

    Ranks that share the vocabulary each have a part of the tokens, whose last is followed by its first.
    """
    allocate = DummySource.allocate

    def changed(self: DummySource, name: str, spec: Any, **shard: Any) -> tuple[torch.Tensor, Any]:
        same = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        values, tasks = allocate(self, same, spec, **shard)
        if name == "lm_head.weight":
            values = values.roll(1, 0)
        elif name == same and name.endswith("embed_tokens.weight"):
            values.mul_(1e4)
        return values, tasks

    DummySource.allocate = changed  # type: ignore[method-assign]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(WORKERS) not in given:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(WORKERS), *filter(None, given)])
