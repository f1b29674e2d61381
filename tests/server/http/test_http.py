"""The HTTP API of a real server with the fake engine, whose output is the alphabet."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

import httpx
import pytest

import engine

Serve = Callable[..., AbstractContextManager[Any]]

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f"}}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_logged(server: Any) -> Iterator[None]:
    before = server.errors
    yield
    assert server.errors == before


def complete(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/v1/completions", json=COMPLETION | body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response, status: int = 400) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def test_a_completion_has_text_and_usage(http: httpx.Client) -> None:
    body = complete(http)
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["choices"] == [{"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("prompt", "echoes"),
    [("xy", ["xy"]), (["x", "y"], ["x", "y"]), ([120, 121], ["xy"]), ([[120], [121, 122]], ["x", "yz"])],
)
def test_a_prompt_is_text_tokens_or_a_list_of_either(http: httpx.Client, prompt: Any, echoes: list[str]) -> None:
    choices = complete(http, prompt=prompt, echo=True)["choices"]
    assert [choice["text"] for choice in choices] == [echo + "abcd" for echo in echoes]


@pytest.mark.parametrize(("skip", "echoed"), [(None, "xy"), (True, "xy"), (False, "x<eos>y")])
def test_echo_contains_special_tokens_on_request(http: httpx.Client, skip: bool | None, echoed: str) -> None:
    prompt = [ord("x"), 256, ord("y")]
    (choice,) = complete(http, prompt=prompt, echo=True, skip_special_tokens=skip)["choices"]
    assert choice["text"] == echoed + "abcd"


def test_n_choices_of_several_prompts_have_different_seeds(http: httpx.Client) -> None:
    body = complete(http, prompt=["x", "yy"], n=3, seed=1)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["bcde", "cdef", "defg"] * 2
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 24


def test_max_tokens_defaults(http: httpx.Client) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != "max_tokens"}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 16


def test_a_stop_string_ends_the_text_and_the_request(server: Any, http: httpx.Client) -> None:
    body = complete(http, stop=["zz", "de"], max_tokens=200)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5
    server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)


def test_logprobs_with_echo(http: httpx.Client) -> None:
    choice = complete(http, prompt="xyz", echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "xyzab"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z", "a", "b"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"y": -0.5}, {"z": -0.5}, {"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 2, "n": 2, "prompt": ["é" * 120, "x" * 250]},  # in several pieces
        {"n": 2, "prompt": ["x", "y"], "seed": 3},
    ],
)
def test_a_stream_adds_up_to_the_whole_response(http: httpx.Client, extra: dict[str, Any]) -> None:
    whole = complete(http, **extra)
    body = COMPLETION | extra | {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, usage = events(http.post("/v1/completions", json=body))
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces)
    assert len({piece["id"] for piece in pieces}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine][-1] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in mine[:-1])
        if choice["logprobs"]:
            joined = [token for piece in mine for token in piece["logprobs"]["tokens"]]
            assert joined == choice["logprobs"]["tokens"]
            offsets = [offset for piece in mine for offset in piece["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert len(offsets) == len(joined) >= usage["usage"]["completion_tokens"] // len(whole["choices"])


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_streams_on_one_connection(http: httpx.Client, max_tokens: int) -> None:
    for _ in range(3):
        pieces = events(http.post("/v1/completions", json=COMPLETION | {"max_tokens": max_tokens, "stream": True}))
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "abc"[:max_tokens]


def test_a_chat_has_message_logprobs_and_usage(http: httpx.Client) -> None:
    body = http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2}).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcd", "refusal": None}
    assert choice["finish_reason"] == "length"
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], len(first["top_logprobs"])) == ("a", [97], 2)
    assert body["usage"]["prompt_tokens"] == len("<user>hi<assistant>")


def test_a_chat_stream_has_every_choice_and_usage(http: httpx.Client) -> None:
    body = CHAT | {"stream": True, "n": 2, "seed": 0, "stream_options": {"include_usage": True}}
    *pieces, usage = events(http.post("/v1/chat/completions", json=body))
    assert usage["usage"]["completion_tokens"] == 8
    for index, text in enumerate(("abcd", "bcde")):
        first, *rest, last = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"]["content"] for piece in rest) == text
        assert (last["delta"], last["finish_reason"]) == ({}, "length")


def test_chat_without_max_tokens_fills_the_context(http: httpx.Client) -> None:
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 256


def test_chat_takes_no_top_logprobs_without_logprobs(http: httpx.Client) -> None:
    body = http.post("/v1/chat/completions", json=CHAT | {"logprobs": False, "top_logprobs": 0}).json()
    assert body["choices"][0]["logprobs"] is None


def test_chat_takes_text_parts(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = CHAT | {"messages": [{"role": "developer", "content": parts}]}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == len("<system>h\ni<assistant>")


def test_chat_template_variables(http: httpx.Client) -> None:
    body = CHAT | {"chat_template_kwargs": {"begin": "<think>"}}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == len("<user>hi<think>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION | {"best_of": 2}, "best_of"),
        ("/v1/completions", COMPLETION | {"suffix": "x"}, "suffix"),
        ("/v1/completions", COMPLETION | {"prompt": []}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ""}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [[]]}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [257]}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [-1]}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 4}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [2**70]}, "prompt"),
        ("/v1/completions", COMPLETION | {"seed": 2**70}, "seed"),
        ("/v1/completions", COMPLETION | {"logit_bias": {str(2**70): 1}}, "logit_bias"),
        ("/v1/completions", COMPLETION | {"max_tokens": 2**70}, "max_tokens"),
        ("/v1/completions", COMPLETION | {"min_tokens": 2**70}, "min_tokens"),
        ("/v1/completions", COMPLETION | {"n": 65}, "n"),
        ("/v1/completions", COMPLETION | {"logprobs": 21}, "logprobs"),
        ("/v1/completions", COMPLETION | {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", COMPLETION | {"max_tokens": 252}, "max_tokens"),
        ("/v1/completions", COMPLETION | {"min_tokens": 5}, "min_tokens"),
        ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", CHAT | {"tools": [{}]}, "tools[0].type"),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, "tools"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function"}}, "tool_choice"),
        (
            "/v1/chat/completions",
            CHAT | {"chat_template_kwargs": {"reasoning_effort": 1}, "reasoning_effort": "low"},
            "reasoning_effort",
        ),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ("/v1/chat/completions", CHAT | {"store": True}, "store"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            "/v1/completions",
            COMPLETION | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (
            "/v1/completions",
            COMPLETION | {"structured_outputs": {"structural_tag": {"type": "any_tokens"}}},
            "structured_outputs.structural_tag",
        ),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": False}, "add_special_tokens"),
        ("/v1/completions", COMPLETION | {"cache_salt": "s" * 257}, "cache_salt"),
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [1, "a"]}, "prompt"),
        ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 257}, "messages"),
    ],
)
def test_refusals_name_the_parameter(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(http.post(path, json=body))["param"] == param


def test_a_prompt_that_fills_the_context_is_refused(http: httpx.Client) -> None:
    error = refusal(http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 256, "max_tokens": None}))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_refused_by_the_engine_is_a_400(http: httpx.Client, stream: bool) -> None:
    error = refusal(http.post("/v1/completions", json=COMPLETION | {"prompt": "refuse me", "stream": stream}))
    assert error["message"] == "this prompt is refused by the engine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_before_its_first_token_is_the_servers_error(http: httpx.Client, stream: bool) -> None:
    response = http.post("/v1/completions", json=COMPLETION | {"prompt": "fail me", "stream": stream})
    assert refusal(response, 500)["message"] == "this request failed in the engine"


def test_another_model_is_not_found(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})):
        error = refusal(http.post(path, json=body | {"model": "gpt"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_bodies_above_the_limit_are_refused(http: httpx.Client) -> None:
    big = json.dumps(COMPLETION | {"prompt": "x" * 100_000}).encode()
    refusal(http.post("/v1/completions", content=big), 413)
    chunks = (big[start : start + 10_000] for start in range(0, len(big), 10_000))
    refusal(http.post("/v1/completions", content=chunks), 413)


def test_errors_of_unknown_paths_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    refusal(http.get("/v1/nothing"), 404)
    refusal(http.get("/v1/completions"), 405)


def test_models_lists_the_served_model_alone(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()
    (model,) = models["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 256)
    assert (models["first_id"], models["last_id"], models["has_more"]) == (MODEL, MODEL, False)
    assert (model["type"], model["display_name"]) == ("model", MODEL)
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert http.get(f"/v1/models/{MODEL}").json() == model
    refusal(http.get("/v1/models/other"), 404)


def test_ping_version_and_tokenizer_info_answer(http: httpx.Client) -> None:
    assert http.get("/ping").json() == http.get("/health").json()
    assert http.get("/version").json() == {"version": engine.__version__}
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["model_max_length"]) == ("<eos>", None, 256)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_has_the_usage_so_far_on_request(http: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (CHAT if "chat" in path else COMPLETION) | {"stream": True, "stream_options": options, "n": 2}
    chunks = events(http.post(path, json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)


def test_detokenize_inverts_tokenize(http: httpx.Client) -> None:
    body = http.post("/tokenize", json={"prompt": "héj"}).json()
    assert body == {"tokens": list("héj".encode()), "count": 4, "max_model_len": 256}
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "héj"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert bytes(chat["tokens"]) == b"<user>hi<assistant>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_all_choices(server: Any, gate: Any, stream: bool) -> None:
    aborted = server.metrics()['engine_requests_finished_total{finish_reason="abort"}']
    with server.asked(COMPLETION | {"prompt": gate.prompt, "n": 4, "stream": stream}):
        server.until(lambda: server.metrics()["engine_num_requests_running"] == 4)
    server.until(lambda: server.metrics()['engine_requests_finished_total{finish_reason="abort"}'] == aborted + 4)
    server.until(lambda: server.metrics()["engine_num_requests_running"] == 0)


def test_metrics_have_each_process_of_the_server(server: Any) -> None:
    started = re.findall(r'process_start_time_seconds{process="(\w+)"', " ".join(server.metrics()))
    assert started == ["supervisor", "front_end", "engine"]


def test_api_key_is_required_except_for_health(serve_fake: Serve) -> None:
    with serve_fake(api_key=("sécret",)) as server, server.client() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ping").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing", "/tokenizer_info"):
            assert refusal(http.get(path), 401)["code"] == "invalid_api_key"
        wrong = {"authorization": "Bearer wrong"}
        assert refusal(http.post("/v1/completions", json=COMPLETION, headers=wrong), 401)
        right = {"authorization": "Bearer sécret".encode()}
        assert http.post("/v1/completions", json=COMPLETION, headers=right).status_code == 200
        assert server.stop() == 0


def test_requests_above_max_waiting_are_refused(serve_fake: Serve, gate: Any) -> None:
    """As overload while others are in progress; as invalid if even an idle server would refuse them."""
    with serve_fake(max_waiting=3) as server, server.client() as http:
        for body, param in (({"n": 4}, "n"), ({"prompt": ["a", "b", "c", "d"]}, "prompt")):
            error = refusal(http.post("/v1/completions", json=COMPLETION | body))
            assert error["param"] == param
            assert "server.max_waiting" in error["message"]
        long = COMPLETION | {"prompt": gate.prompt, "n": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            response = httpx.post(f"{server.url}/v1/completions", json=COMPLETION | {"n": 2}, timeout=30)
            assert refusal(response, 503)["code"] == "overloaded"
            assert response.headers["retry-after"] == "1"
        server.until(lambda: http.post("/v1/completions", json=COMPLETION | {"n": 3}).status_code == 200)


@pytest.mark.parametrize("cause", ["die_after", "raise_after"])
def test_a_dead_engine_fails_requests_and_health(serve_fake: Serve, cause: str, alive: Callable[[int], bool]) -> None:
    with serve_fake(replica_restarts=0, options={cause: 5, "delay": 0.01}) as server, server.client() as http:
        engine = server.engine_pid()
        response = http.post("/v1/completions", json=COMPLETION | {"max_tokens": 200, "stream": True})
        *_, last, rest = response.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert rest == ""
        assert refusal(http.post("/v1/completions", json=COMPLETION), 503)["code"] == "engine_failed"
        assert server.metrics(http.get)["engine_up"] == 0
        health = http.get("/health")
        assert health.status_code == 503
        assert set(health.json()) == {"status", "level", "reason", "since"}
        assert health.json()["level"] == "process"
        assert ("SIGKILL" if cause == "die_after" else "the fake step failed") in health.json()["reason"]
        assert not alive(engine)
        assert server.stop() == 1


def test_a_killed_supervisor_leaves_no_processes_or_files(serve_fake: Serve, alive: Callable[[int], bool]) -> None:
    with serve_fake(api_workers=2) as server:
        assert len(server.leftovers()) == 1
        children = server.children()
        assert len(children) == 3
        os.kill(server.process.pid, signal.SIGKILL)
        server.until(lambda: not any(map(alive, children)))
        assert server.leftovers() == []


def test_sigterm_finishes_streams_and_refuses_new_requests(
    serve_fake: Serve, gate: Any, alive: Callable[[int], bool]
) -> None:
    with serve_fake() as server, server.client() as http:
        engine = server.engine_pid()
        body = COMPLETION | {"prompt": gate.prompt, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()
            server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
            refused = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=30)
            assert refusal(refused, 503)["code"] == "shutting_down"
            assert refused.headers["connection"] == "close"
            gate.open()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(30) == 0
        assert not alive(engine)


def test_a_stream_ends_with_an_error_after_shutdown_timeout(serve_fake: Serve, gate: Any) -> None:
    with serve_fake(shutdown_timeout=0.2) as server, server.client() as http:
        body = COMPLETION | {"prompt": gate.prompt, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.process.wait(30) == 0


def test_a_second_signal_exits_immediately(serve_fake: Serve, gate: Any, alive: Callable[[int], bool]) -> None:
    with serve_fake() as server, server.client() as http:
        engine = server.engine_pid()
        body = COMPLETION | {"prompt": gate.prompt, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # dropping it would close the connection
            next(lines)
            server.process.terminate()
            server.until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
            server.process.terminate()
            assert server.process.wait(30) == 128 + signal.SIGTERM
        assert not alive(engine)


def test_the_server_exits_with_the_error_when_the_engine_cannot_start(serve_fake: Serve) -> None:
    with serve_fake(options={"start_error": "there is not enough memory"}) as server:
        assert server.process.returncode == 1
        assert server.errors == "error: there is not enough memory\n"


def test_the_server_exits_when_the_engine_process_exits_at_start(serve_fake: Serve) -> None:
    with serve_fake(options={"exit": 3}) as server:
        assert server.process.returncode == 1
        assert server.errors == "error: the engine could not start: its process exited with code 3\n"


def test_the_server_exits_when_a_front_end_cannot_start(serve_fake: Serve) -> None:
    with serve_fake(tokenizer="broken", api_workers=2) as server:
        assert server.process.returncode == 1
        assert server.errors == "error: the tokenizer is broken\n"
        assert server.leftovers() == []


def test_the_server_exits_when_the_port_is_in_use(server: Any, serve_fake: Serve) -> None:
    port = int(server.url.rpartition(":")[2])
    with serve_fake(port=port) as second:
        assert second.process.returncode == 1
        assert f"cannot listen on 127.0.0.1, port {port}" in second.errors
