from __future__ import annotations

import math

import pytest

from engine.core.types import EngineStats, Output, RequestTimes, TokenLogprobs
from engine.server.engine_process import output_routes
from engine.server.engine_process.output_routes import OutputRoutes
from engine.server.shared.messages import Outputs
from engine.server.shared.packed_logprobs import SLICE, unpack

A, B = b"0.1", b"1.2"


def make_routes() -> OutputRoutes:
    routes = OutputRoutes()
    for peer in (A, B):
        routes.add_front_end(peer)
    return routes


def send_first_outputs(routes: OutputRoutes, *requests: str) -> None:
    """Send the first outputs, which are never in columns."""
    list(routes.group([Output(request=request, tokens=(1,)) for request in requests], None))


def test_outputs_of_a_step_are_one_message_per_front_end() -> None:
    routes = make_routes()
    assert [routes.add(A, 7, ["x"]), routes.add(B, 7, "y"), routes.add(A, 8, "z")] == [True] * 3
    send_first_outputs(routes, "x", "y", "z")
    outputs = [Output(request=name, tokens=tokens) for name, tokens in (("x", (5,)), ("y", (6,)), ("z", (7, 8)))]
    assert dict(routes.group(outputs, None)) == {
        A: Outputs([7, 8], [1, 2], [5, 7, 8], []),
        B: Outputs([7], [1], [6], []),
    }
    assert list(routes.group([], None)) == []


def test_outputs_with_more_than_tokens_are_sent_in_full() -> None:
    routes = make_routes()
    for number, request in enumerate("abc"):
        routes.add(A, number, [request])
    start = Output(request="a", tokens=(1,), cached_tokens=16)
    assert dict(routes.group([start], None)) == {A: Outputs([], [], [], [(0, start)])}
    send_first_outputs(routes, "b", "c")
    times = RequestTimes(arrival=0, scheduled=1, first_token=2, finished=3)
    end = Output(request="a", tokens=(2,), finish_reason="length", times=times, cached_tokens=16)
    likely = Output(request="b", tokens=(3,), logprobs=(TokenLogprobs(token=3, logprob=-1.0, rank=1),))
    plain = Output(request="c", tokens=(4,), cached_tokens=16)
    assert dict(routes.group([end, likely, plain], None)) == {A: Outputs([2], [1], [4], [(0, end), (1, likely)])}
    assert list(routes.group([plain, Output(request="a", tokens=(9,))], None)) == [(A, Outputs([2], [1], [4], []))]


def test_outputs_of_a_request_with_a_prediction_are_sent_in_full() -> None:
    routes = make_routes()
    routes.add(A, 0, ["a"])
    for output in (
        Output(request="a", tokens=(1,), prediction_tokens=(0, 0)),
        Output(request="a", tokens=(2,)),
        Output(request="a", tokens=(3, 4), prediction_tokens=(1, 2)),
    ):
        assert dict(routes.group([output], None)) == {A: Outputs([], [], [], [(0, output)])}


def test_log_probabilities_of_a_prompt_are_sent_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_routes, "PACK_SECONDS", math.inf)  # all slices in one call
    routes = make_routes()
    routes.add(A, 7, ["x"])
    entries = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1, top=((token, -1.0),)) for token in range(300))
    output = Output(request="x", tokens=(1,), prompt_logprobs=entries)
    ((_, message),) = routes.group([output], None)
    assert message.full == [(7, Output(request="x", tokens=(1,)))]
    (packed,) = message.prompt_logprobs
    assert packed.number == 7
    assert len(packed.slices) == 3
    assert tuple(unpack(packed.slices)) == entries
    assert dict(routes.group([Output(request="x", tokens=(2,))], None)) == {A: Outputs([7], [1], [2], [])}


def test_outputs_wait_for_the_log_probabilities_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_routes, "PACK_SECONDS", -1.0)  # one slice per call
    routes = make_routes()
    for number, name in enumerate(("x", "y", "z", "gone")):
        routes.add(A, number, [name])
    send_first_outputs(routes, "z")
    entries = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in range(2 * SLICE))
    first = [Output(request=name, tokens=(1,), prompt_logprobs=entries) for name in ("gone", "x")]
    messages = list(routes.group([*first, Output(request="z", tokens=(7,))], None))
    assert messages == [(A, Outputs([2], [1], [7], []))]  # the others go on
    assert list(routes.remove(A, [3])) == ["gone"]
    last = Output(request="x", tokens=(2,), finish_reason="length")
    assert list(routes.group([last], None)) == []
    assert routes.behind
    while routes.behind:
        messages = list(routes.group([], None))
    ((_, message),) = messages
    assert message.full == [(0, Output(request="x", tokens=(1,))), (0, last)]
    assert [packed.number for packed in message.prompt_logprobs] == [0]
    assert list(routes.remove(A, [0, 1])) == ["y"]


def test_statistics_are_sent_to_all_front_ends() -> None:
    routes = make_routes()
    stats = EngineStats(running=1)
    assert dict(routes.group([], stats)) == {peer: Outputs([], [], [], [], stats) for peer in (A, B)}


def test_aborted_requests_send_no_outputs() -> None:
    routes = make_routes()
    routes.add(A, 1, ["x"])
    assert list(routes.remove(A, (1, 2))) == ["x"]
    assert list(routes.remove(A, (1,))) == []
    assert list(routes.group([Output(request="x", tokens=(1,))], None)) == []


def test_an_exited_front_end_is_not_added_again() -> None:
    routes = make_routes()
    routes.add(A, 1, ["x"])
    routes.add(A, 2, ["y"])
    routes.add(B, 1, ["z"])
    assert routes.remove_front_end(A) == ["x", "y"]
    routes.add_front_end(A)
    assert not routes.add(A, 3, ["w"])
    assert [peer for peer, _ in routes.group([Output(request="x"), Output(request="z", tokens=(1,))], None)] == [B]
