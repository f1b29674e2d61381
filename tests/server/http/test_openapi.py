"""/openapi.json against what a real server does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import jsonschema
import pytest

from engine.server.http import chat, completions, status, tokenize

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ASKS_FOR_NOTHING: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "store": False,
    "metadata": {"run": "1"},
    "service_tier": "auto",
    "verbosity": "medium",
    "modalities": ["text"],
    "prompt_cache_retention": "in_memory",
    "top_logprobs": 0,
    "prompt_cache_key": "session-1",
    "safety_identifier": "user-1",
    "stop": "",
    "seed": -1,
    "top_k": -1,
}
CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi", "name": "Ann"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
    {"role": "assistant", "tool_calls": None, "refusal": "no", "annotations": [], "parsed": {"a": 1}},
]
MODULES = (chat, completions, status, tokenize)


@pytest.fixture(scope="module")
def document(server: Any) -> Any:
    return httpx.get(f"{server.url}/openapi.json", timeout=30).json()


def check_response(document: Any, response: httpx.Response) -> None:
    """Check a response against the document."""
    path = response.request.url.path
    template = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    declared = document["paths"][template][response.request.method.lower()]["responses"][str(response.status_code)]
    for name, header in declared["headers"].items():
        if name in response.headers:
            jsonschema.validate(response.headers[name], header["schema"])
        else:
            assert not header.get("required")
    if response.request.method == "HEAD":
        assert "content" not in declared
        return
    kind = response.headers["content-type"].partition(";")[0]
    body = response.json() if kind == "application/json" else response.text
    check_schema(document, declared["content"][kind]["schema"], body)


def check_schema(document: Any, schema: Any, value: Any) -> None:
    jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(value)


def accepts(document: Any, name: str, body: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(body))


def test_the_document_has_valid_schemas_and_no_dangling_reference(document: Any) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = httpx.Response(200, json=document).text
    used = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert used <= set(document["components"]["schemas"])
    operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(operations)) == len(operations)


class Anything:
    """Stands for a service of which routes only keep the parts."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()


def test_every_route_and_no_other_is_described(document: Any) -> None:
    service: Any = Anything()
    routes: list[Any] = [one for module in MODULES for one in module.routes(service).routes]
    found = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods}
    found |= {("/openapi.json", method) for method in ("get", "head")}
    of_plugins = ("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens")
    found |= {(path, "post") for path in of_plugins}
    assert found == {(path, method) for path, methods in document["paths"].items() for method in methods}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", CHAT | {"max_tokens": 4, "thinking": {"type": "adaptive"}, "stop_sequences": ["zz"]}),
        ("/v1/messages", CHAT | {"max_tokens": 4, "stream": True, "system": [{"type": "text", "text": "a"}]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "hi"}),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 4}),
        ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": "hi"}], "stream": True}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", COMPLETION | {"prompt": [[1], [2, 3]], "echo": True, "logprobs": 2, "n": 2, "best_of": 2}),
        ("/v1/completions", COMPLETION | {"stop": ["zz", "yy"], "logit_bias": {"5": 1.5}, "top_k": None, "user": "me"}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"stream": True, "response_format": {"type": "text"}}),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
        (
            "/v1/chat/completions",
            CHAT
            | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
        ),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": {"type": "object"}}}),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"choice": ["a"], "regex": None}}),
        ("/v1/completions", COMPLETION | {"structured_outputs": {"structural_tag": {"type": "any_text"}}}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("/v1/chat/completions", CHAT | ASKS_FOR_NOTHING),
        ("/v1/chat/completions", CHAT | {"messages": HISTORY}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [104, 105]}),
    ],
)
def test_valid_bodies_are_answered_as_described(
    document: Any, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    check_schema(
        document, document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"], body
    )
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    check_response(document, response)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("/v1/completions", COMPLETION, {}),
        ("/v1/chat/completions", CHAT, {}),
        ("/tokenize", {"prompt": "x"}, {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": []}, {}),
    ],
)
def test_refusals_are_described(
    document: Any, http: httpx.Client, path: str, body: dict[str, Any], wrong: dict[str, Any]
) -> None:
    form = {"origin": "http://evil.example", "content-type": "text/plain"}
    responses = {
        400: http.post(path, json=wrong),
        403: http.post(path, json=body, headers=form),
        404: http.post(path, json=body | {"model": "other"}),
        413: http.post(path, json={"prompt": "x" * 100_000}),
        415: http.post(path, json=body, headers={"content-encoding": "gzip"}),
    }
    for status_code, response in responses.items():
        assert response.status_code == status_code
        check_response(document, response)


READ = ("/v1/models", "/v1/models/tiny", "/v1/models/x", "/health", "/health?deep=1", "/health?deep=2", "/metrics")
SMALL = ("/ping", "/version", "/tokenizer_info")


@pytest.mark.parametrize("path", [*READ, *SMALL, "/openapi.json"])
def test_what_can_be_read_is_described(document: Any, http: httpx.Client, path: str) -> None:
    check_response(document, http.get(path))
    check_response(document, http.head(path))
    check_response(document, http.get(path, headers={"host": "evil.example"}))


COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_tokens": None},
    "min_tokens": {"max_tokens": None},
}
"""What else a parameter needs in order to be valid."""
TOGETHER_WITH_THE_PROMPT = ("max_tokens", "max_completion_tokens", "min_tokens")
"""Parameters whose maximum is valid only for some prompts."""


def limited_numbers(document: Any) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """(schema, parameter, [minimum, maximum], [below, above]) of each limited number."""
    for name in ("CompletionBody", "ChatBody"):
        for parameter, schema in document["components"]["schemas"][name]["properties"].items():
            for one in schema.get("anyOf", ()):
                if "maximum" not in one:
                    continue
                step, high = 1 if one["type"] == "integer" else 0.001, one["maximum"]
                if "minimum" in one:
                    low = one["minimum"]
                    yield name, parameter, [low, high], [low - step, high + step]
                else:
                    low = one["exclusiveMinimum"]
                    yield name, parameter, [math.nextafter(low, high), high], [low, high + step]


def test_the_limits_of_numbers_are_the_servers(document: Any, http: httpx.Client) -> None:
    found = list(limited_numbers(document))
    assert len(found) >= 24
    for name, parameter, inside, outside in found:
        path, body = ("/v1/completions", COMPLETION) if name == "CompletionBody" else ("/v1/chat/completions", CHAT)
        for value in [*inside, *outside]:
            asked = body | COMPANIONS.get(parameter, {}) | {parameter: value}
            if parameter == "best_of":
                asked["n"] = value
            status = http.post(path, json=asked).status_code
            assert accepts(document, name, asked) is (value in inside), (name, parameter, value)
            if value in outside:
                assert status == 400, (name, parameter, value)
            elif value == inside[0] or parameter not in TOGETHER_WITH_THE_PROMPT:
                assert status == 200, (name, parameter, value)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("CompletionBody", COMPLETION | {"unknown": 1}),
        ("CompletionBody", COMPLETION | {"suffix": "x"}),
        ("CompletionBody", COMPLETION | {"prompt": ""}),
        ("CompletionBody", COMPLETION | {"prompt": []}),
        ("CompletionBody", COMPLETION | {"prompt": ["a"] * 4}),
        ("CompletionBody", COMPLETION | {"prompt": [257]}),
        ("CompletionBody", COMPLETION | {"stop": ["a"] * 3}),
        ("CompletionBody", COMPLETION | {"stop": [""]}),
        ("CompletionBody", COMPLETION | {"stop": "x" * 257}),
        ("CompletionBody", COMPLETION | {"logit_bias": {"1": 101}}),
        ("CompletionBody", COMPLETION | {"logit_bias": {"x": 1}}),
        ("CompletionBody", COMPLETION | {"logit_bias": {"1": 1, "2": 1, "3": 1}}),
        ("CompletionBody", COMPLETION | {"stop_token_ids": [257]}),
        ("ChatBody", CHAT | {"messages": [{"role": "function", "content": "x"}]}),
        ("ChatBody", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("ChatBody", CHAT | {"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
        ("ChatBody", CHAT | {"store": True}),
        ("ChatBody", CHAT | {"tool_choice": "any"}),
        ("ChatBody", CHAT | {"tool_choice": {"type": "function"}}),
        ("ChatBody", CHAT | {"functions": [{"name": "f"}]}),
        ("ChatBody", CHAT | {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}),
        ("ChatBody", CHAT | {"service_tier": "flex"}),
        ("ChatBody", CHAT | {"response_format": {"type": "xml"}}),
        ("ChatBody", CHAT | {"response_format": {"type": "json_schema"}}),
        ("ChatBody", CHAT | {"response_format": {"type": "text", "json_schema": {"name": "x"}}}),
        ("ChatBody", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
        ("ChatBody", CHAT | {"structured_outputs": {"structural_tag": 1}}),
        ("CompletionBody", COMPLETION | {"structured_outputs": {"choice": []}}),
        ("CompletionBody", COMPLETION | {"response_format": {"type": "text"}}),
    ],
)
def test_what_the_document_refuses_the_server_refuses(
    document: Any, http: httpx.Client, name: str, body: dict[str, Any]
) -> None:
    assert not accepts(document, name, body)
    path = "/v1/completions" if name == "CompletionBody" else "/v1/chat/completions"
    assert http.post(path, json=body).status_code == 400


def test_keys_and_limits_are_described(serve_fake: Serve) -> None:
    with serve_fake(api_key=("k",), rate_limit=1) as server, server.client(authorization="Bearer k") as http:
        assert httpx.get(f"{server.url}/openapi.json", timeout=30).status_code == 401
        document = http.get("/openapi.json").json()
        assert document["components"]["securitySchemes"] == {
            "key": {"type": "http", "scheme": "bearer"},
            "keyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        assert document["paths"]["/health"]["get"]["security"] == []
        for status in (200, 429):
            response = http.post("/v1/completions", json=COMPLETION)
            assert response.status_code == status
            check_response(document, response)
        response = httpx.get(f"{server.url}/v1/models", timeout=30)
        assert response.status_code == 401
        check_response(document, response)


def test_the_description_is_left_out_on_demand(serve_fake: Serve) -> None:
    with serve_fake(openapi=False) as server:
        assert httpx.get(f"{server.url}/openapi.json", timeout=30).status_code == 404
