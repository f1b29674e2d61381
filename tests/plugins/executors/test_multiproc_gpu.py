"""The runner in its own process on a GPU: the same tokens, and the GPU's memory is free again, however it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.core import Engine, SamplingParams
from engine.core.errors import ExecutorError

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
SLACK = 64 * 2**20
"""Bytes of a GPU's memory that others may take or give meanwhile."""


def build(checkpoint: Path, executor: str, **settings: Any) -> Engine:
    common = {"executor__device": "cuda", "model__dtype": "float32", "cache__memory": "256MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), executor=executor, **{**common, **settings})


def free() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_the_same_tokens_as_uniproc(engine_checkpoint: Path, graphs: str) -> None:
    made = []
    for executor in ("uniproc", "multiproc"):
        with build(engine_checkpoint, executor, executor__graphs=graphs) as engine:
            made.append([one.token_ids for one in engine.generate(PROMPTS, GREEDY)])
    assert made[0] == made[1]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_memory_is_free_again(engine_checkpoint: Path, until: Callable[..., None], end: str) -> None:
    before = free()
    with build(engine_checkpoint, "multiproc") as engine:
        assert before - free() > 256 * 2**20
        stream = engine.stream(PROMPTS[0], attrs.evolve(GREEDY, max_tokens=None))
        next(stream)
        if end == "kill":
            executor: Any = engine._executor
            os.kill(executor._workers.workers[0]._process.pid, signal.SIGKILL)
            with pytest.raises(ExecutorError, match="SIGKILL"):
                list(stream)
        else:
            stream.close()  # type: ignore[attr-defined]
    until(lambda: before - free() < SLACK)
