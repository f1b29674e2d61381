"""`engine serve` publishes the events of its prefix cache to a subscriber over ZeroMQ, in the format of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from engine.testing.checkpoints import make_checkpoint
from tests.core.kv_events.router import Subscriber

pytestmark = pytest.mark.e2e

ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")


def test_subscriber_follows_a_server_and_a_late_one_catches_up(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / "tiny", tokenizer=True)
    command = [*ENGINE, "serve", "--model", str(directory), "--port", "0", "--max-len", "256", "--dtype", "float32"]
    command += ["--threads", "1", "--kv-memory", "256KiB", "--kv-metrics", "--kv-metrics-sample", "1"]
    command += ["--kv-events", f"ipc://{tmp_path}/events", "--kv-events-replay", f"ipc://{tmp_path}/replay"]
    command += ["--kv-events-topic", "kv@pod-{rank}@tiny"]
    server = start_server(command)
    assert server.url, server.errors
    context = zmq.Context()
    subscriber = Subscriber(context, tmp_path, b"kv@pod-0@")
    try:
        blocks = sum(value for name, value in server.metrics().items() if name.startswith("engine_kv_blocks{"))
        prompt = [number % 250 for number in range(3, 67)]

        def complete(tokens: list[int]) -> None:
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "temperature": 0}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()

        complete(prompt)
        server.until(lambda: (subscriber.read() or True) and len(subscriber.router.prefix(prompt, 16, "")) == 4)
        assert subscriber.types[0] == "AllBlocksCleared"
        for number in range(int(blocks) // 4 + 2):
            complete([number, *range(1, 64)])
        server.until(lambda: (subscriber.read() or True) and not subscriber.router.prefix(prompt, 16, ""))
        assert "BlockRemoved" in subscriber.types
        while subscriber.read():
            pass
        late = Subscriber(context, tmp_path, b"kv@pod-0@")
        late.catch_up()
        subscriber.catch_up()
        assert late.router.known() == subscriber.router.known()
        assert late.types == subscriber.types
        late.close()
        server.until(lambda: server.metrics()["engine_kv_event_batches_total"] == subscriber.seen + 1)
        metrics = server.metrics()
        assert metrics["engine_kv_event_batches_dropped_total"] == 0
        assert metrics["engine_kv_block_lifetime_seconds_count"] >= 4
    finally:
        subscriber.close()
        context.term()
    assert server.stop() == 0
