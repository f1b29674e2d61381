from __future__ import annotations

import math
from typing import Any, cast

import pytest

from engine.core.errors import InvalidRequestError, PluginError
from engine.core.grammars import Grammar
from engine.core.types import MAX_SEED, Request, SamplingParams
from engine.server.engine_process import pending_requests
from engine.server.engine_process.output_routes import OutputRoutes
from engine.server.engine_process.pending_requests import PendingRequests
from engine.server.shared.messages import Add

A, B = b"0.1", b"1.2"


class RecordingEngine:
    """Takes the requests that are added; refuses empty prompts."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.compiled: set[str] = set()
        """Sources of grammars that are compiled; of all others `add` would wait."""

    def can_add(self, request: Request) -> bool:
        grammar = request.params.grammar
        return grammar is None or grammar.source in self.compiled

    def add(self, request: Request) -> None:
        if not request.prompt:
            raise InvalidRequestError("the prompt is empty", "prompt")
        assert self.can_add(request)
        if request.params.grammar == Grammar.regex("broken"):
            raise PluginError("the grammar backend is broken")
        self.requests.append(request)

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.requests]


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def routes() -> OutputRoutes:
    routes = OutputRoutes()
    for peer in (A, B):
        routes.add_front_end(peer)
    return routes


@pytest.fixture
def pending(engine: RecordingEngine, routes: OutputRoutes, monkeypatch: pytest.MonkeyPatch) -> PendingRequests:
    monkeypatch.setattr(pending_requests, "ADD_SECONDS", math.inf)  # a slow machine adds no fewer in a step
    return PendingRequests(cast("Any", engine), routes)


def request(name: str, prompt: tuple[int, ...] = (1, 2), **params: Any) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(**params), salt="s", priority=3, arrival=1.5)


def test_choices_differ_in_id_and_seed_and_share_all_else(pending: PendingRequests, engine: RecordingEngine) -> None:
    pending.put(A, Add(5, (request("x", seed=MAX_SEED), request("y", (3,))), choices=3))
    assert pending.add_some() == []
    assert not pending
    assert engine.ids == ["x-0", "x-1", "x-2", "y-0", "y-1", "y-2"]
    assert [each.params.seed for each in engine.requests] == [MAX_SEED, 0, 1, None, None, None]
    assert {(each.salt, each.priority, each.arrival) for each in engine.requests} == {("s", 3, 1.5)}
    assert len({id(each.prompt) for each in engine.requests}) == 2
    assert len({id(each.params) for each in engine.requests[3:]}) == 1


def test_a_refused_request_yields_an_error_output(pending: PendingRequests, engine: RecordingEngine) -> None:
    pending.put(A, Add(0, (request("x", prompt=()), request("y"))))
    (output,) = pending.add_some()
    assert (output.request, output.finish_reason, output.error) == ("x-0", "error", "the prompt is empty")
    assert (output.refused, output.parameter) == (True, "prompt")
    assert engine.ids == ["y-0"]


def test_requests_whose_grammars_are_compiled_let_others_pass(
    pending: PendingRequests, engine: RecordingEngine, routes: OutputRoutes
) -> None:
    pending.put(A, Add(0, (request("x", grammar=Grammar.regex("a")),), choices=2))
    pending.put(A, Add(2, (request("y", grammar=Grammar.regex("b")), request("free"))))
    pending.put(B, Add(0, (request("z"),)))
    pending.put(B, Add(1, (request("gone", grammar=Grammar.regex("c")),)))
    assert pending.add_some() == []
    assert engine.ids == ["z-0"]
    assert pending
    assert pending.only_compiling
    engine.compiled.add("b")
    pending.add_some()
    assert engine.ids == ["z-0", "y-0", "free-0"]
    list(routes.remove(B, (1,)))
    engine.compiled.add("a")
    pending.add_some()
    assert engine.ids == ["z-0", "y-0", "free-0", "x-0", "x-1"]
    assert not pending
    assert not pending.only_compiling


def test_a_broken_grammar_backend_is_no_fault_of_the_client(pending: PendingRequests, engine: RecordingEngine) -> None:
    engine.compiled.add("broken")
    pending.put(A, Add(0, (request("x", grammar=Grammar.regex("broken")), request("y"))))
    (output,) = pending.add_some()
    assert (output.refused, output.error) == (False, "the grammar backend is broken")
    assert engine.ids == ["y-0"]


def test_aborted_requests_and_those_of_an_exited_front_end_are_not_added(
    pending: PendingRequests, engine: RecordingEngine, routes: OutputRoutes
) -> None:
    pending.put(A, Add(0, (request("x"),), choices=4))
    pending.put(B, Add(0, (request("y"),)))
    assert list(routes.remove(A, (1, 2))) == ["x-1", "x-2"]
    routes.remove_front_end(B)
    pending.put(B, Add(1, (request("z"),)))
    pending.add_some()
    assert engine.ids == ["x-0", "x-3"]


def test_many_choices_wait_for_later_steps_and_let_other_requests_pass(
    pending: PendingRequests, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_requests, "ADD_SECONDS", 0.0)  # one request per step
    pending.put(A, Add(0, (request("many"),), choices=1000))
    pending.put(B, Add(0, (request("one"),)))
    pending.add_some()
    pending.add_some()
    assert engine.ids == ["many-0", "one-0"]
    assert pending
