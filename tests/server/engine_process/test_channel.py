"""Messages to an engine process, from front ends and from the supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from engine.core.executors import encode
from engine.server.engine_process import main
from engine.server.engine_process.main import MAX_MESSAGES, Channel
from engine.server.shared.messages import Abort, Shutdown


@pytest.mark.parametrize(("seconds", "at_most"), [(-1.0, 1), (60.0, MAX_MESSAGES)])
def test_messages_wait_for_the_next_step_when_they_are_many_or_slow_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, at_most: int
) -> None:
    monkeypatch.setattr(main, "RECEIVE_SECONDS", seconds)
    with zmq.Context() as context:
        channel = Channel(context, tmp_path / "engine")
        with context.socket(zmq.DEALER) as front_end:
            front_end.setsockopt(zmq.IDENTITY, b"0.1")
            front_end.connect(f"ipc://{tmp_path / 'engine'}")
            for number in range(40):
                front_end.send(encode(Abort((number,))))
            found: list[list[object]] = []
            while sum(map(len, found)) < 40:
                channel.wait(5000)
                found.append([message for _, message in channel.receive()])
            assert max(map(len, found)) <= at_most
            assert [message for each in found for message in each] == [Abort((number,)) for number in range(40)]
        channel.close()


def test_a_message_of_the_supervisor_after_the_channel_is_closed_is_dropped(tmp_path: Path) -> None:
    with zmq.Context() as context:
        channel = Channel(context, tmp_path / "engine")
        channel.put(Shutdown())
        channel.wait(5000)
        assert [message for _, message in channel.receive()] == [Shutdown()]
        channel.close()
        channel.put(Shutdown())
