"""An engine that publishes the events of its prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.core import Engine, Request, SamplingParams
from engine.core.errors import ConfigError
from engine.testing.checkpoints import make_checkpoint
from tests.core.kv_events.router import Router, Subscriber

PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Subscriber]:
    context = zmq.Context()
    made = Subscriber(context, tmp_path)
    yield made
    made.close()
    context.term()


def build(checkpoint: Path, **settings: Any) -> Engine:
    return Engine(
        model=str(checkpoint),
        **{
            "executor__device": "cpu",
            "cache__memory": "8MiB",
            "model__max_len": 256,
            "cache__block_size": 8,
            **settings,
        },
    )


def test_router_follows_an_engine_through_requests_aborts_and_resets(
    checkpoint: Path, reader: Subscriber, tmp_path: Path
) -> None:
    endpoints = {
        "kv_events__endpoint": f"ipc://{tmp_path}/events",
        "kv_events__replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    with build(checkpoint, **endpoints) as engine:

        def follow() -> Router:
            """The reader's router, once it has followed all that is published."""
            counts = engine.stats().kv_events
            assert counts is not None
            while reader.seen < counts[0] - 1:
                reader.catch_up()
            return reader.router

        engine.generate([PROMPT], GREEDY)
        assert len(follow().prefix(PROMPT, 8, "")) == 5
        assert reader.types[:2] == ["AllBlocksCleared", "BlockStored"]
        engine.add(Request(id="a", prompt=PROMPT[::-1], params=GREEDY, salt="mine"))
        engine.step()
        assert len(follow().prefix(PROMPT[::-1], 8, "mine")) >= 4
        assert reader.router.prefix(PROMPT[::-1], 8, "") == []
        engine.abort("a")
        while engine.has_work:
            engine.step()
        engine.reset_prefix_cache()
        assert follow().known() == set()
        assert reader.types[-1] == "AllBlocksCleared"


def test_abort_of_a_request_that_computed_nothing_is_published(checkpoint: Path, tmp_path: Path) -> None:
    with build(checkpoint, kv_events__endpoint=f"ipc://{tmp_path}/events", max_batch_tokens=8) as engine:
        engine.add(Request(id="a", prompt=PROMPT, params=GREEDY))
        engine.step()
        before = engine.stats().kv_events
        engine.abort("a")
        after = engine.stats().kv_events
        assert before is not None
        assert after == (before[0] + 1, 0)


def test_engine_without_events_counts_none(checkpoint: Path) -> None:
    with build(checkpoint) as engine:
        assert engine.stats().kv_events is None
        assert engine.stats().cache is None


def test_cache_metrics_setting_measures_the_cache_of_an_engine(checkpoint: Path) -> None:
    with build(checkpoint, cache__metrics=True, cache__metrics_sample=1.0) as engine:
        for _ in range(2):
            engine.generate([PROMPT], GREEDY)
        cache = engine.stats().cache
        assert cache is not None
        assert (sum(cache.hit_age.counts), cache.sample) == (4, 1.0)
        assert cache.tenants == (("unsalted", 80, 32),)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_events__endpoint": "localhost:5557"}, "is no endpoint; write it as tcp://127.0.0.1:5557"),
        ({"kv_events__endpoint": "tcp://*:0"}, "there is no port 0"),
        ({"kv_events__endpoint": "tcp://*:65535", "server__replicas": 2}, "there is no port 65536"),
        ({"kv_events__endpoint": "ipc:///a", "kv_events__replay_endpoint": "ipc:///a"}, "use others"),
        (
            {
                "kv_events__endpoint": "tcp://*:5557",
                "kv_events__replay_endpoint": "tcp://*:5558",
                "server__replicas": 2,
            },
            "use others",
        ),
        ({"kv_events__replay_endpoint": "ipc:///a"}, "it has no effect without kv_events.endpoint; give that too"),
        ({"kv_events__endpoint": "ipc:///a", "cache__prefix_caching": False}, "prefix_caching is off"),
    ],
)
def test_events_that_cannot_be_published_are_refused(checkpoint: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        build(checkpoint, **settings)
