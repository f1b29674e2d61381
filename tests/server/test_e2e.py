"""`engine serve` on a tiny checkpoint, called with the openai client."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest

from engine.cli.top.command import Watch
from engine.cli.top.screen import lines
from engine.cli.top.server import WatchedServer
from engine.testing.checkpoints import CHAT_TEMPLATE

pytestmark = pytest.mark.e2e

Start = Callable[..., Any]
MAX_LEN = 256
DEMO = Path(__file__).resolve().parents[2] / "demo" / "engine-demo"
ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, start_server: Callable[[Sequence[str]], Any]) -> Start:
    """Starts `engine serve` with these flags."""
    from engine.testing.checkpoints import make_checkpoint

    directory = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tokenizer=True)

    def serve(*flags: str) -> Any:
        command = [*ENGINE, "serve", "--model", str(directory), "--port", "0"]
        command += ["--kv-memory", "8MiB", "--max-len", str(MAX_LEN), "--dtype", "float32", "--threads", "1"]
        command += ["--set", "server.health_interval=0"]  # an idle engine computes no steps, which tests count
        command += ["--grammar-option", "max_whitespace=1", *flags]
        server = start_server(command)
        assert server.url, server.errors
        return server

    return serve


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template that names the tools."""
    made = tmp_path_factory.mktemp("template") / "tools.jinja"
    made.write_text("{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE)
    return made


@pytest.fixture(scope="module")
def server(start: Start, template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    traces = tmp_path_factory.mktemp("traces")
    running = start(
        *("--api-workers", "2", "--parser", "hermes", "--chat-template", str(template)),
        *("--admin-api-key", "admin-secret", "--profile-dir", str(traces)),
    )
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def speculating(start: Start, template: Path) -> Iterator[Any]:
    drafts = ("--speculator", "ngram", "--speculator-option", "min_n=1", "--draft-length", "fixed")
    running = start("--parser", "hermes", "--chat-template", str(template), *drafts)
    yield running
    assert running.metrics()["engine_speculation_accepted_tokens_total"] > 0
    assert running.stop() == 0


@pytest.fixture(params=["plain", "ngram"])
def constrained(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """A client of a server without drafts, then of one with drafts."""
    server = request.getfixturevalue("speculating" if request.param == "ngram" else "server")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_completion_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "once upon", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "max_completion_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_top_shows_what_the_server_did_between_two_looks(server: Any, client: openai.OpenAI) -> None:
    watch = Watch(WatchedServer(server.url), 2.0)
    generated = "engine_generation_tokens_total"
    before = watch.server.scrape().sum(generated)

    def front_end_seconds() -> float:
        return watch.server.scrape().sum("process_cpu_seconds_total", process="front_end")

    watch.look()
    looked = front_end_seconds()
    for _ in range(2):
        client.completions.create(model="tiny", prompt="once upon", max_tokens=8, temperature=0)
    server.until(lambda: watch.server.scrape().sum(generated) == before + 16)
    server.until(lambda: front_end_seconds() > looked)  # its unit is a clock tick, 10 ms
    watch.look()
    watch.server.close()
    found = watch.figures
    assert found is not None
    assert found.total.first_token is not None
    assert found.total.first_token.count == round(sum(found.total.finished.values()) * found.seconds) == 2
    assert found.total.generated_tokens * found.seconds == pytest.approx(16)
    assert {kind.kind for kind in found.roofline} >= {"prefill", "decode", "all"}
    assert [one.role for one in found.processes] == ["supervisor", "front_end", "front_end", "engine"]
    assert found.shares is not None
    assert found.events == []
    text = "\n".join(line.text for line in lines(watch.state(), found, 80, 24))
    assert f"{server.url}  ok  tiny  up" in text


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=8)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)] | None
    likes: Annotated[list[Literal["tea", "té"]], pydantic.Field(max_length=2)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_returns_what_the_model_class_asks_for(constrained: openai.OpenAI, temperature: int) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "somebody"}],
        "max_completion_tokens": 200,
        "temperature": temperature,
        "response_format": Person,
        "n": 4,
    }
    whole = constrained.chat.completions.parse(**asked, seed=5)
    assert all(isinstance(choice.message.parsed, Person) for choice in whole.choices)
    with constrained.chat.completions.stream(**asked, seed=5) as stream:
        streamed = stream.get_final_completion()
    assert [choice.message.parsed for choice in streamed.choices] == [choice.message.parsed for choice in whole.choices]


def test_responses_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "instructions": "be brief", "max_output_tokens": 16}
    whole = client.responses.create(**asked, temperature=0)
    *_, last = client.responses.create(**asked, temperature=0, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert (last.response.status, whole.store) == (whole.status, False)
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens <= 16
    asked = {"model": "tiny", "input": "somebody", "text_format": Person, "max_output_tokens": 200, "temperature": 1}
    assert isinstance(client.responses.parse(**asked).output_parsed, Person)
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


class Weather(pydantic.BaseModel):
    city: Literal["Rome", "Bern"]
    days: Annotated[int, pydantic.Field(ge=0, le=9)] | None


class Now(pydantic.BaseModel):
    """A tool without arguments."""


CALLS: Any = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "weather"}],
    "max_completion_tokens": 150,
    "parallel_tool_calls": False,
}
STRICT: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now)]
ODD: Any = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}}}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", ["required", "Weather"])
def test_a_call_that_is_asked_for_comes(constrained: openai.OpenAI, name: str, temperature: int) -> None:
    choice: Any = name if name == "required" else {"type": "function", "function": {"name": name}}
    asked = {**CALLS, "tools": STRICT, "tool_choice": choice, "temperature": temperature, "n": 2, "seed": 3}
    whole = constrained.chat.completions.parse(**asked)
    for one in whole.choices:
        assert one.finish_reason == ("tool_calls" if name == "required" else "stop")
        assert one.message.content is None
        assert one.message.tool_calls is not None
        [call] = one.message.tool_calls
        assert isinstance(call.function.parsed_arguments, (Weather, Now) if name == "required" else Weather)
    with constrained.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert [[call.function.arguments for call in one.message.tool_calls or ()] for one in streamed.choices] == [
        [call.function.arguments for call in one.message.tool_calls or ()] for one in whole.choices
    ]


def test_the_model_may_answer_or_call(constrained: openai.OpenAI) -> None:
    asked = {**CALLS, "tools": STRICT, "n": 4, "seed": 1, "max_completion_tokens": 40}
    for one in constrained.chat.completions.create(**asked).choices:
        assert one.finish_reason in ("stop", "length", "tool_calls")
    asked |= {"max_completion_tokens": 200, "response_format": Person}
    for choice in constrained.chat.completions.parse(**asked).choices:
        calls = choice.message.tool_calls or []
        assert calls or isinstance(choice.message.parsed, Person)
        assert all(isinstance(call.function.parsed_arguments, (Weather, Now)) for call in calls)


def test_only_the_allowed_tools_are_called(constrained: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "Now"}}]}
    asked = {**CALLS, "tools": STRICT, "n": 4, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    for choice in constrained.chat.completions.create(**asked).choices:
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("Now", {})


def test_a_strict_tool_is_enforced_or_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "odd", "parameters": ODD}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"the tool odd is strict.*uniqueItems") as caught:
            client.chat.completions.create(**CALLS, tools=[strict], stream=stream)
        assert caught.value.param == "tools"
    found = client.chat.completions.create(
        **{**CALLS, "max_completion_tokens": 60}, tools=[tool], tool_choice="required"
    ).choices[0]
    assert found.message.tool_calls
    assert found.message.tool_calls[0].function.arguments.startswith("{")


def test_a_forced_call_that_is_cut_short_reaches_the_client(client: openai.OpenAI) -> None:
    asked = {**CALLS, "max_completion_tokens": 36, "tools": STRICT[:1], "tool_choice": "required"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    said = choice.message.model_dump_json()
    assert "Weather" in said or "<tool_call>" in said


def test_a_custom_tool_gets_what_its_pattern_matches(client: openai.OpenAI) -> None:
    pattern = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{2,4}"}}
    tools: Any = [{"type": "custom", "custom": {"name": "spell", "format": pattern}}]
    choice: Any = {"type": "custom", "custom": {"name": "spell"}}
    found = client.chat.completions.create(**CALLS, tools=tools, tool_choice=choice).choices[0]
    assert found.message.tool_calls
    assert re.fullmatch("[a-c]{2,4}", found.message.tool_calls[0].custom.input)


def test_responses_with_a_call_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = Weather.model_json_schema() | {"additionalProperties": False}
    tool: Any = {"type": "function", "name": "weather", "strict": True, "parameters": schema}
    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    dial: Any = {"type": "custom", "name": "dial", "format": digits}
    asked: Any = {"model": "tiny", "input": "weather", "tools": [tool, dial], "max_output_tokens": 150}
    asked |= {"parallel_tool_calls": False, "temperature": 1, "extra_body": {"seed": 3}}
    [call] = client.responses.create(**asked, tool_choice={"type": "function", "name": "weather"}).output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    *_, last = client.responses.create(**asked, tool_choice={"type": "custom", "name": "dial"}, stream=True)
    [dialled] = last.response.output
    assert re.fullmatch("[0-9]{3}", dialled.input)


def test_structured_outputs_by_the_names_of_vllm(constrained: openai.OpenAI) -> None:
    def ask(**structure: Any) -> str:
        made = constrained.completions.create(
            model="tiny", prompt="say", max_tokens=120, extra_body={"structured_outputs": structure}
        )
        assert made.choices[0].finish_reason == "stop"
        return made.choices[0].text

    assert ask(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[a-c]{2,4}", ask(regex="[a-c]{2,4}"))
    assert json.loads(ask(json={"enum": [1, "one"]})) in (1, "one")
    assert ask(grammar='start: "(" "x" ")"') == "(x)"
    assert ask(json='{"const": null}') == "null"
    call = {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"const": 1}},
        "end": "</f>",
    }
    assert ask(structural_tag={"type": "structural_tag", "format": call}) == "<f>1</f>"
    assert ask(structural_tag=json.dumps(call)) == "<f>1</f>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_would_not_be_enforced_is_refused_by_its_keyword(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "numbers"}], "n": 2, "stream": stream}
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(**asked, response_format=form)
    assert caught.value.param == "response_format"


def test_seeded_choices_are_reproducible(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str]:
        made = client.completions.create(
            model="tiny", prompt="the", n=n, seed=seed, max_tokens=16, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in made.choices]

    first = ask(7, 3)
    assert len(set(first)) == 3
    assert ask(7, 3) == first
    assert ask(8, 2) == first[1:]  # choice i has seed + i, in any batch


def test_the_prompt_of_several_choices_comes_from_the_cache(client: openai.OpenAI) -> None:
    prompt = "a long prompt that fills some blocks of the cache " * 3
    for _ in range(2):
        made = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=2)
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens is not None
    assert made.usage.prompt_tokens_details.cached_tokens >= 32


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "once", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[5:7]
    choice = client.completions.create(**asked, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]
    pieces = list(client.completions.create(**asked, stop=stop, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_logprobs_of_both_apis(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="tiny", prompt="hello there", echo=True, logprobs=3, max_tokens=4, temperature=0
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert made.usage is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == made.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=4,
        temperature=0,
    )
    assert chat.choices[0].logprobs is not None
    for token in chat.choices[0].logprobs.content or []:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob  # greedy: the most likely token
        assert token.bytes is not None
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_errors_of_each_kind(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model="tiny", prompt="x", extra_body={"guided": 1})
    assert unknown.value.param == "guided"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tool_choice="required"
        )
    assert tools.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x " * MAX_LEN)
    assert long.value.code == "context_length_exceeded"


def test_streams_closed_by_clients_free_their_blocks(server: Any) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> int:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"stream {index} " * (1 + index % 7),
            max_tokens=8 + index % 40,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = 0
        async for _ in stream:
            pieces += 1
            if index % 3 == 0:
                await stream.close()
                break
        return pieces

    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    pieces = asyncio.run(all_of_them())
    assert all(count > 0 for count in pieces)
    assert pieces[::3] == [1] * 22  # closed after the first piece; the engine aborts these requests:
    server.until(lambda: server.metrics()['engine_requests_finished_total{finish_reason="abort"}'] > 0)
    used = ('engine_kv_blocks{state="used"}', "engine_num_requests_running", "engine_num_requests_waiting")

    def is_idle() -> bool:
        metrics = server.metrics()
        return all(metrics[name] == 0 for name in used)

    server.until(is_idle)


def test_profiles_of_a_running_server_have_every_process(server: Any, client: openai.OpenAI) -> None:
    with server.client(authorization="Bearer admin-secret") as admin:
        assert admin.post("/stop_profile").json()["error"]["message"].startswith("no profile was started")
        for _ in range(2):  # a second one is as whole as the first
            started = admin.post("/start_profile", json={"steps": 5, "after": 2})
            assert started.status_code == 200, started.text
            again = admin.post("/start_profile")
            assert (again.status_code, again.json()["error"]["code"]) == (409, "busy")
            client.completions.create(model="tiny", prompt="x", max_tokens=20, extra_body={"ignore_eos": True})
            (report,) = admin.post("/stop_profile", json={"wait": True}).json()["replicas"]
            assert (report["replica"], report["steps"], report["cut"]) == (0, 5, [])
            assert report["path"] == started.json()["replicas"][0]["path"]
            front_ends = [name for name in report["processes"] if name.startswith("front end")]
            assert len(front_ends) == 2
            assert set(report["processes"]) == {*front_ends, "engine", "rank 0"}
            events = json.loads(gzip.decompress(Path(report["path"]).read_bytes()))["traceEvents"]
            names = {event["name"] for event in events}
            assert {"outputs", "detokenize", "write", "schedule", "decode 1"} <= names
            assert any(name.startswith("aten::") for name in names)
            assert any(name.startswith("request cmpl-") for name in names)
        admin.post("/start_profile")
        client.completions.create(model="tiny", prompt="x", max_tokens=3)
        stopped = admin.post("/stop_profile").json()["replicas"][0]
        assert 0 < stopped["steps"] < 10
        refused = admin.post("/start_profile", json={"steps": 10_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "refused")
        assert "at most 200" in refused.json()["error"]["message"]


def test_layers_of_a_running_server_are_profiled(server: Any, client: openai.OpenAI) -> None:
    with server.client(authorization="Bearer admin-secret") as admin:
        refused = admin.post("/stop_layer_profile")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "refused")
        assert "steps is 1000; from 1 to 200" in admin.post("/start_layer_profile", json={"steps": 1000}).text
        for _ in range(2):
            (began,) = admin.post("/start_layer_profile", json={"steps": 5}).json()["replicas"]
            client.completions.create(model="tiny", prompt="x", max_tokens=20, extra_body={"ignore_eos": True})
            (ended,) = admin.post("/stop_layer_profile").json()["replicas"]
            (rank,) = ended["ranks"]
            assert (rank["steps"], rank["decodes"], rank["num_rows"]) == (5, [1], len(rank["rows"]))
            assert ended["steps"] - began["steps"] == 20
            names = {row[0] for row in rank["rows"]}
            assert {"model.layers.1.mlp.down_proj", "lm_head", "(sampling)"} <= names


def test_a_killed_engine_process_ends_streams_with_an_error(start: Start, alive: Callable[[int], bool]) -> None:
    server = start("--replica-restarts", "0")
    engine = server.engine_pid()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGKILL)
        start_time = time.monotonic()
        last = [line for line in lines if line][-1]
        assert time.monotonic() - start_time < 10  # 2 by the documentation, and more where the machine is busy
    assert last.startswith('data: {"error":')
    with server.client_per_front_end(len(server.front_end_pids())) as clients:
        for client in clients:
            server.until(lambda client=client: client.get("/health").status_code == 503)
            assert client.post("/v1/completions", json=body).status_code == 503
    assert not alive(engine)
    assert server.stop() == 1


def test_sigterm_drains_and_sigkill_leaves_no_processes(start: Start, alive: Callable[[int], bool]) -> None:
    draining = start("--api-workers", "1", "--max-running", "1")
    engine = draining.engine_pid()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "n": 4, "ignore_eos": True}
    with httpx.stream("POST", f"{draining.url}/v1/completions", json=body | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGSTOP)  # so that the stream outlasts what follows
        try:
            draining.process.terminate()
            draining.until(lambda: httpx.get(f"{draining.url}/health", timeout=30).json()["status"] == "draining")
            assert httpx.post(f"{draining.url}/v1/completions", json=body, timeout=30).status_code == 503
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert draining.process.wait(30) == 0
    assert not alive(engine)

    killed = start()
    engine = killed.engine_pid()
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.until(lambda: not alive(engine))


@contextlib.contextmanager
def serve_demo(start_server: Callable[[Sequence[str]], Any], quant: str) -> Iterator[openai.OpenAI]:
    """A client of a server of the demo model."""
    flags = ["--model", str(DEMO), "--quant", quant, "--port", "0", "--kv-memory", "16MiB", "--threads", "1"]
    server = start_server([*ENGINE, "serve", *flags])
    assert server.url, server.errors
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    assert server.stop() == 0


@pytest.fixture(scope="module")
def demo(start_server: Callable[[Sequence[str]], Any]) -> Iterator[openai.OpenAI]:
    with serve_demo(start_server, "none") as client:
        yield client


def test_the_demo_model_quantized_at_load_gives_nearly_the_same_logprobs(
    demo: openai.OpenAI, start_server: Callable[[Sequence[str]], Any]
) -> None:
    """With int8 weights and activations the tokens are the same and the logprobs nearly so."""

    def ask(client: openai.OpenAI) -> tuple[str, list[float]]:
        asked: Any = {"model": "engine-demo", "prompt": "def read_lines(path):\n", "max_tokens": 12, "temperature": 0}
        pieces = list(client.completions.create(**asked, logprobs=1, stream=True))
        logprobs = [value for piece in pieces if (of := piece.choices[0].logprobs) for value in of.token_logprobs or ()]
        return "".join(piece.choices[0].text for piece in pieces), [value for value in logprobs if value is not None]

    text, logprobs = ask(demo)
    with serve_demo(start_server, "int8") as client:
        quantized, theirs = ask(client)
    assert quantized == text
    assert theirs == pytest.approx(logprobs, abs=0.25)
    assert theirs != logprobs


BLOCK = 16


def cached(usage: Any) -> int:
    """The cached tokens that a response reports."""
    return usage.prompt_tokens_details.cached_tokens  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_turn_of_a_chat_reports_the_first_one_and_its_answer_as_cached(
    demo: openai.OpenAI, stream: bool
) -> None:
    first: list[Any] = [{"role": "user", "content": f"Write a function that reads lines, please (streamed: {stream})."}]
    asked: Any = {"model": "engine-demo", "max_tokens": 100, "temperature": 0, "prompt_cache_key": "session"}

    def turn(messages: list[Any]) -> tuple[str, Any]:
        if not stream:
            made = demo.chat.completions.create(**asked, messages=messages)
            return made.choices[0].message.content or "", made.usage
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(demo.chat.completions.create(**asked, **options, messages=messages))
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices), pieces[-1].usage

    answer, usage = turn(first)
    assert usage.completion_tokens >= 2 * BLOCK, "the answer fills blocks"
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And one that writes?"}]
    _, again = turn(second)
    assert cached(again) >= usage.prompt_tokens + usage.completion_tokens - BLOCK
    assert cached(again) % BLOCK == 0
    asked["extra_body"] = {"cache_salt": f"another tenant {stream}"}
    assert cached(turn(second)[1]) == 0


def test_a_completion_that_goes_on_reports_the_earlier_one_and_its_answer_as_cached(demo: openai.OpenAI) -> None:
    asked: Any = {"model": "engine-demo", "max_tokens": 40, "temperature": 0}
    asked["extra_body"] = {"prompt_cache_key": "session", "ignore_eos": True}
    prompt = 'def write_lines(path, lines):\n    """Write lines to a file, each with an end of line."""\n'
    made = demo.completions.create(**asked, prompt=prompt)
    assert made.usage is not None
    again = demo.completions.create(**asked, prompt=f"{prompt}{made.choices[0].text}\n\ndef next_one():\n")
    assert cached(again.usage) >= made.usage.prompt_tokens + made.usage.completion_tokens - 2 * BLOCK


def test_a_missing_checkpoint_is_an_error_without_traceback(
    start_server: Callable[[Sequence[str]], Any], tmp_path: Path
) -> None:
    server = start_server([*ENGINE, "serve", "--model", str(tmp_path / "none"), "--port", "0"])
    assert server.process.returncode not in (0, None)
    assert "none" in server.errors
    assert "Traceback" not in server.errors


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _cycle() -> dict[str, Any]:
    names = [f"n{at}" for at in range(40)]
    every = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"$ref": "#/$defs/n0", "$defs": {name: {"allOf": every} for name in names}}


EXPLODING: list[tuple[dict[str, Any], str]] = [
    ({"json": _nested(100)}, r"nested more than 64 deep \(grammar.max_depth\)"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text matches"),
    ({"json": _cycle()}, "circular references"),
    ({"json": {"enum": [f"{at:09}" for at in range(10_000)]}}, r"at most 65536 \(grammar.max_chars\)"),
    ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, ""),
    ({"regex": "(a|aa)*" * 2000 + "(x+x+)+y{1,100000}"}, "limits"),
    ({"grammar": "start: start start"}, "no text matches"),
]
"""Grammars, and what the refusal says; empty: the output ends."""


def test_exploding_grammars_are_refused_or_end_and_another_stream_goes_on(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "x", "max_tokens": 8}
    tokens, done = 0, threading.Event()

    def read() -> None:
        nonlocal tokens
        given: Any = asked | {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
        while not done.is_set():
            with client.completions.create(**given) as stream:
                for _ in stream:
                    tokens += 1
                    if done.is_set():
                        break

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while not tokens:
            time.sleep(0.01)
        before = tokens
        for grammar, sentence in EXPLODING:
            given = asked | {"extra_body": {"structured_outputs": grammar}}
            if not sentence:
                assert client.completions.create(**given).choices[0].finish_reason in ("stop", "length")
                continue
            with pytest.raises(openai.BadRequestError, match=sentence) as caught:
                client.completions.create(**given)
            assert caught.value.param == "structured_outputs"
        assert tokens > before + len(EXPLODING)
    finally:
        done.set()
        reader.join()
