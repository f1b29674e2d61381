from __future__ import annotations

from engine.core.types import EngineStats, Output, RequestTimes, TokenLogprobs
from engine.server.engine_process.output_routes import Routes
from engine.server.shared.messages import Outputs

A, B = b"0.1", b"1.2"


def routes() -> Routes:
    made = Routes()
    for peer in (A, B):
        made.open(peer)
    return made


def first(made: Routes, *requests: str) -> None:
    """Let the first outputs go, which are never plain."""
    list(made.sort([Output(request=request, tokens=(1,)) for request in requests], None))


def test_a_steps_outputs_are_one_message_a_front_end() -> None:
    made = routes()
    assert [made.add(A, 7, "x"), made.add(B, 7, "y"), made.add(A, 8, "z")] == [True] * 3
    first(made, "x", "y", "z")
    outputs = [Output(request=name, tokens=tokens) for name, tokens in (("x", (5,)), ("y", (6,)), ("z", (7, 8)))]
    assert dict(made.sort(outputs, None)) == {
        A: Outputs([7, 8], [1, 2], [5, 7, 8], []),
        B: Outputs([7], [1], [6], []),
    }
    assert list(made.sort([], None)) == []


def test_outputs_with_more_than_tokens_go_whole() -> None:
    made = routes()
    for number, request in enumerate("abc"):
        made.add(A, number, request)
    start = Output(request="a", tokens=(1,), cached_tokens=16)
    assert dict(made.sort([start], None)) == {A: Outputs([], [], [], [(0, start)])}
    first(made, "b", "c")
    times = RequestTimes(arrival=0, scheduled=1, first_token=2, finished=3)
    end = Output(request="a", tokens=(2,), finish_reason="length", times=times, cached_tokens=16)
    likely = Output(request="b", tokens=(3,), logprobs=(TokenLogprobs(token=3, logprob=-1.0, rank=1),))
    plain = Output(request="c", tokens=(4,), cached_tokens=16)
    assert dict(made.sort([end, likely, plain], None)) == {A: Outputs([2], [1], [4], [(0, end), (1, likely)])}
    assert list(made.sort([plain, Output(request="a", tokens=(9,))], None)) == [(A, Outputs([2], [1], [4], []))]


def test_statistics_go_to_all() -> None:
    made = routes()
    stats = EngineStats(running=1)
    assert dict(made.sort([], stats)) == {peer: Outputs([], [], [], [], stats) for peer in (A, B)}


def test_aborted_requests_are_heard_of_no_more() -> None:
    made = routes()
    made.add(A, 1, "x")
    assert list(made.remove(A, (1, 2))) == ["x"]
    assert list(made.remove(A, (1,))) == []
    assert list(made.sort([Output(request="x", tokens=(1,))], None)) == []


def test_a_front_end_that_is_gone_stays_gone() -> None:
    made = routes()
    made.add(A, 1, "x")
    made.add(A, 2, "y")
    made.add(B, 1, "z")
    assert made.close(A) == ["x", "y"]
    made.open(A)
    assert not made.add(A, 3, "w")
    assert [peer for peer, _ in made.sort([Output(request="x"), Output(request="z", tokens=(1,))], None)] == [B]
