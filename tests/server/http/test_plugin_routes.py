"""Routes of plugins: what is refused when they register, and a third party's protocol over HTTP."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.routing import Route

from engine.core.hooks import hookimpl
from engine.core.plugin_host import load_plugins
from engine.core.protocols import ApiError
from engine.server.http.errors import READ
from engine.server.http.plugin_routes import PluginRoute, plugin_routes

Serve = Callable[..., AbstractContextManager[Any]]
Register = Callable[[Any], object]

DOCS = Path(__file__).parents[3] / "docs" / "plugins.md"
POEM = '''
import asyncio

import msgspec

from engine.core.hooks import hookimpl
from engine.core.protocols import AnswerWriter, Conversation, sse_event


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/poem."""

    subject: str
    stream: bool = False
    wait: float = 0.0


class Poem(AnswerWriter):
    stream_end = b"data: the end\\n\\n"

    def __init__(self, fail):
        self.parts = []
        self.fail = fail

    def add(self, delta):
        self.parts += [event.text for event in delta.said]
        yield

    def body(self, usage):
        yield msgspec.json.encode({"poem": "".join(self.parts), "tokens": usage.completion_tokens})

    def events(self, delta, usage):
        for event in delta.said:
            if event.text == "!":
                raise KeyError("exclamation")
            yield sse_event({"line": event.text}, "line")

    def end(self, usage):
        return sse_event({"tokens": usage.completion_tokens}, "end")

    def error_event(self, error):
        if self.fail:
            raise KeyError("again")
        return sse_event({"failed": error.message}, "failed")


@hookimpl
def register_routes(routes):
    async def write(wish, call):
        if wish.subject == "bug":
            raise KeyError("verse")
        if wish.subject == "exit":
            raise SystemExit(3)
        if wish.subject == "cancel":
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost
        if wish.subject == "nothing":
            return None
        await asyncio.sleep(wish.wait)
        messages = [{"role": "user", "content": "say " + wish.subject}]
        conversation = Conversation(messages=messages, sampling={"temperature": 0})
        headers = {"x-metre": call.query.get("metre", "free"), "x-model": routes.model}
        return await routes.respond(
            f"poem-{wish.subject[:3]}", conversation, Poem(wish.subject == "a!!"), stream=wish.stream, headers=headers
        )

    async def count(call):
        messages = [{"role": "user", "content": call.headers["x-subject"]}]
        return routes.json({"tokens": await routes.count_tokens(Conversation(messages=messages)), "of": routes.max_len})

    routes.post(
        "/v1/poem", Order, write, api="1", summary="A poem", streams=True, error_body=lambda one: {"no": one.message}
    )
    routes.get("/v1/poem_length", count, api="1")
'''
BROKEN = """
from engine.core.hooks import hookimpl

@hookimpl
def register_routes(routes):
    async def handler(call):
        return routes.json({})

    routes.get("/v1/half", handler, api="1")
    routes.get("/health", handler, api="1")
"""


def documented() -> str:
    """The example of docs/plugins.md."""
    [source] = re.findall(
        r"^```python\n# poem.py\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return str(source)


@pytest.fixture(scope="module")
def poems(serve_fake: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with a third party's protocol and another plugin that fails to register."""
    directory = tmp_path_factory.mktemp("installed")
    for name, source in (("poem", POEM), ("broken", BROKEN), ("documented", documented())):
        (directory / f"{name}_plugin.py").write_text(source)
        info = directory / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[engine]\n{name} = {name}_plugin\n")
    keys = directory / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        limits = {"rate_limit": 1000, "request_timeout": 3, "max_body_bytes": 1000}
        with serve_fake(api_key_file=str(keys), **limits, options={"delay": 0.01}) as server:
            yield server
            assert server.stop() == 0


@pytest.fixture(scope="module")
def client(poems: Any) -> Iterator[httpx.Client]:
    with poems.client(authorization="Bearer secret") as client:
        yield client


def test_a_third_partys_protocol_answers(client: httpx.Client) -> None:
    response = client.post("/v1/poem?metre=iamb", json={"subject": "sea"})
    assert response.json() == {"poem": "sea", "tokens": 4}
    assert response.headers["x-request-id"] == "poem-sea"
    assert (response.headers["x-metre"], response.headers["x-model"]) == ("iamb", "tiny")
    assert client.get("/v1/poem_length", headers={"x-subject": "sea"}).json() == {"tokens": 20, "of": 256}
    assert client.head("/v1/poem_length", headers={"x-subject": "sea"}).content == b""


def test_a_third_partys_route_streams(client: httpx.Client) -> None:
    response = client.post("/v1/poem", json={"subject": "sea", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end, last = response.text.strip().split("\n\n")
    assert "".join(json.loads(line.removeprefix("event: line\ndata: "))["line"] for line in lines) == "sea"
    assert (end, last) == ('event: end\ndata: {"tokens":4}', "data: the end")


def test_the_documented_example_answers_and_streams(client: httpx.Client) -> None:
    about = "the moon"
    whole = client.post("/v1/poems", json={"about": about}).json()
    assert whole["tokens"] == 100
    *lines, last = client.post("/v1/poems", json={"about": about, "stream": True}).text.strip().split("\n\n")
    assert "".join(json.loads(line.removeprefix("data: "))["more"] for line in lines) == whole["poem"]
    assert last == 'data: {"tokens":100}'
    refused = client.post("/v1/poems", json={"about": ""})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "about")
    assert client.get("/openapi.json").json()["paths"]["/v1/poems"]["post"]["summary"] == "Write a poem"


def test_errors_have_the_shape_of_the_path(poems: Any, client: httpx.Client) -> None:
    cases = [
        (client.post("/v1/poem", json={"subject": 1}), 400, "subject: expected str"),
        (client.post("/v1/poem", json={"subject": "x", "rhyme": 1}), 400, "rhyme is not a parameter"),
        (client.post("/v1/poem", json={"subject": "x" * 1000}), 413, "larger than 1000 bytes"),
        (client.post("/v1/poem", json={"subject": "x" * 500}), 400, "context holds 256 tokens"),
        (client.post("/v1/poem", json={"subject": "bug"}), 500, "the plugin of /v1/poem failed"),
        (client.post("/v1/poem", json={"subject": "x", "wait": 60}), 504, "longer than 3 s"),
        (client.get("/v1/poem"), 405, "use POST"),
        (client.get("/v1/poem/a/b"), 404, "there is no GET /v1/poem/a/b"),
        (httpx.post(f"{poems.url}/v1/poem", json={"subject": "x"}), 401, "the API key is missing"),
    ]
    for response, status, said in cases:
        assert response.status_code == status
        assert said in response.json()["no"]
    assert "poem 1.5 failed in its route /v1/poem" in poems.errors
    assert "KeyError: 'verse'" in poems.errors


def test_a_handler_that_exits_cancels_or_returns_something_else_is_named_and_ends_no_other_request(
    poems: Any, client: httpx.Client
) -> None:
    """SystemExit in a task would end the event loop, and the front end with all its requests."""
    with client.stream("POST", "/v1/poem", json={"subject": "x and so on", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for subject in "exit", "cancel", "nothing":
            refused = client.post("/v1/poem", json={"subject": subject})
            assert refused.status_code == 500
            assert refused.json() == {"no": "the plugin of /v1/poem failed; see the server's log"}
        assert "took longer than 3 s" in list(lines)[-2]
    assert "SystemExit: 3" in poems.errors
    assert "asyncio.exceptions.CancelledError" in poems.errors
    assert "the handler returned None, not a Reply" in poems.errors


def test_a_writer_that_fails_ends_its_stream_alone(poems: Any, client: httpx.Client) -> None:
    for subject, last in (("a!", '{"failed":'), ("a!!", '{"error":')):
        response = client.post("/v1/poem", json={"subject": subject, "stream": True})
        assert last in response.text.strip().split("\n\n")[-1]
        assert "plugin 'poem' of poem 1.5 failed in events(); see the server's log" in response.text
    assert "plugin 'poem' of poem 1.5 failed in events() of its AnswerWriter" in poems.errors
    assert "plugin 'poem' of poem 1.5 failed in error_event() of its AnswerWriter" in poems.errors
    assert client.post("/v1/poem", json={"subject": "sea"}).json()["poem"] == "sea"


def test_a_client_that_leaves_ends_its_request(poems: Any, client: httpx.Client) -> None:
    def aborted() -> float:
        metrics: dict[str, float] = poems.metrics(client.get)
        return metrics['engine_requests_finished_total{finish_reason="abort"}']

    before = aborted()
    with client.stream("POST", "/v1/poem", json={"subject": "x and so on", "stream": True}) as response:
        assert next(response.iter_bytes())
    poems.until(lambda: aborted() > before)


def test_a_plugin_that_fails_to_register_is_named_and_adds_nothing(poems: Any, client: httpx.Client) -> None:
    assert "plugin 'broken' of broken 1.5 could not add its routes: the path /health belongs to the server" in (
        poems.errors
    )
    assert client.get("/v1/half").status_code == 404
    assert client.get("/health").json()["status"] == "ok"


def test_a_described_route_is_in_the_document(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = document["paths"]["/v1/poem"]["post"]
    assert described["summary"] == "A poem"
    assert described["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/plugin.Order"
    }
    assert set(document["components"]["schemas"]["plugin.Order"]["properties"]) == {"subject", "stream", "wait"}
    assert "text/event-stream" in described["responses"]["200"]["content"]
    assert "/v1/poem_length" not in document["paths"]


class Made:
    """A plugin whose hook is a function."""

    def __init__(self, register: Register) -> None:
        self._register = register

    @hookimpl
    def register_routes(self, routes: Any) -> object:
        return self._register(routes)


async def handler(*_: Any) -> Any:
    raise AssertionError


def made(*plugins: Made) -> list[PluginRoute]:
    """The routes of plugins, next to the server's own /health and /v1/models/{model}."""
    own = [Route("/health", handler, methods=READ), Route("/v1/models/{model:path}", handler, methods=READ)]
    return plugin_routes(cast("Any", None), load_plugins(extra=plugins), own)


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda routes: routes.get("/health", handler, api="1"), "the path /health belongs to the server"),
        (lambda routes: routes.post("/health", dict, handler, api="1"), "the path /health belongs to the server"),
        (lambda routes: routes.get("/v1/models/mine", handler, api="1"), "/v1/models/mine belongs to the server"),
        (lambda routes: routes.get("/a", handler, api="2"), "for version '2' .* this engine has version '1'"),
        (lambda routes: routes.get("a", handler, api="1"), "'a' is no path"),
        (lambda routes: routes.get("/{a}", handler, api="1"), "is no path; give a literal one"),
        (lambda routes: routes.post("/a", "Body", handler, api="1"), "has the type 'Body'"),
        (lambda routes: [routes.get("/a", handler, api="1") for _ in range(2)], "adds GET /a twice"),
        (lambda routes: 1, r"register_routes\(\) returns 1"),
        (lambda routes: 1 / 0, "ZeroDivisionError"),
        (lambda routes: routes.get("/a", handler), "TypeError"),
    ],
)
def test_a_mistake_is_a_warning_that_names_the_plugin(
    register: Register, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def once(routes: Any) -> object:
        routes.get("/b", handler, api="1")
        return register(routes)

    good = Made(lambda routes: routes.post("/c", dict, handler, api="1"))
    found = made(Made(once), good)
    assert [one.path for one in found if one.plugin.startswith("plugin 'Made'")] == ["/c"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("plugin 'Made'")
    assert "could not add its routes" in warning
    assert re.search(reason, warning)


def test_the_second_plugin_of_a_path_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def register(routes: Any) -> None:
        routes.post("/v1/mine", dict, handler, api="1")
        routes.get("/v1/mine", handler, api="1")

    found = [one for one in made(Made(register), Made(register)) if one.path == "/v1/mine"]
    assert [one.methods for one in found] == [["POST"], READ]
    assert "the path /v1/mine is taken by plugin 'Made'" in caplog.text


def test_a_path_has_one_shape_of_errors(caplog: pytest.LogCaptureFixture) -> None:
    def register(routes: Any) -> None:
        routes.post("/v1/mine", msgspec.Struct, handler, api="1", error_body=ApiError.body)
        routes.get("/v1/mine", handler, api="1")

    assert not [one for one in made(Made(register)) if one.path == "/v1/mine"]
    assert "different error_body" in caplog.text


def test_a_method_is_one_shape_of_errors_for_all_routes_of_a_path() -> None:
    class Protocol:
        def error_body(self, error: ApiError) -> object:
            raise AssertionError

        def register(self, routes: Any) -> None:
            routes.post("/v1/mine", dict, handler, api="1", error_body=self.error_body)
            routes.get("/v1/mine", handler, api="1", error_body=self.error_body)

    found = [one for one in made(Made(Protocol().register)) if one.path == "/v1/mine"]
    assert [one.methods for one in found] == [["POST"], READ]
