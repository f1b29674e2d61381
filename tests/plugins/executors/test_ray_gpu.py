"""The Ray executor on GPUs: the same tokens, on one and on two, and the GPUs' memory is free again."""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams

ray = pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:unclosed file <_io:ResourceWarning"),  # by older versions of Ray
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
SLACK = 64 * 2**20
"""Bytes of a GPU's memory that others may take or give meanwhile."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A node that has all GPUs, which this process belongs to."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 unless set: next to nothing of a busy machine
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the user's home
        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.WARNING)
        yield
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
        shutil.rmtree(directory, ignore_errors=True)
        gc.collect()  # what Ray has not closed, before later tests come upon it


def build(checkpoint: Path, executor: str, **settings: Any) -> Engine:
    common = {"executor__device": "cuda", "model__dtype": "float32", "cache__memory": "256MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), executor=executor, **{**common, **settings})


def free() -> int:
    """Of all GPUs: which one an actor has is Ray's choice."""
    import torch

    return sum(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_the_same_tokens_as_uniproc(engine_checkpoint: Path, until: Callable[..., None], graphs: str) -> None:
    with build(engine_checkpoint, "uniproc", executor__graphs=graphs) as one:
        expected = [made.token_ids for made in one.generate(PROMPTS, GREEDY)]
    free()  # takes memory itself when it first looks
    before = free()
    with build(engine_checkpoint, "ray", executor__graphs=graphs) as engine:
        assert before - free() > 256 * 2**20
        assert [made.token_ids for made in engine.generate(PROMPTS, GREEDY)] == expected
    until(lambda: before - free() < SLACK)


@pytest.mark.usefixtures("cluster")
def test_two_gpus_share_a_model_and_their_memory(engine_checkpoint: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    made = {}
    for executor in ("tp", "ray"):
        with build(engine_checkpoint, executor, executor__tensor_parallel=2) as engine:
            made[executor] = [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]
            if executor == "ray":
                inner: Any = engine._executor
                places = [worker.location for worker in inner._workers.workers]
                assert len({place.gpus for place in places}) == 2
    assert made["ray"] == made["tp"]
