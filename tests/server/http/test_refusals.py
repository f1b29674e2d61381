"""What a refused request gets back: errors in OpenAI's shape that repeat at most a line of the request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.server.front_end.errors import MAX_MESSAGE, ApiError, excerpt

LONG = "long" * 10_000
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"model": LONG}),
        ("/v1/completions", COMPLETION | {LONG: 1}),
        ("/v1/completions", COMPLETION | {"stream_options": {LONG: 1}}),
        ("/v1/completions", COMPLETION | {"logit_bias": {LONG: 1}}),
        ("/v1/completions", COMPLETION | {"suffix": LONG}),
        ("/v1/completions", COMPLETION | {"n": LONG}),
        ("/v1/completions", COMPLETION | {"max_tokens": 10**400}),
        ("/v1/completions", COMPLETION | {"prompt": [10**400]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": LONG, "content": "x"}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": LONG}}),
        ("/v1/chat/completions", CHAT | {"tool_choice": LONG}),
        ("/tokenize", {"prompt": "x", LONG: 1}),
        ("/detokenize", {"tokens": [LONG]}),
        (f"/{LONG}", {}),
        (f"/v1/models/{LONG}", {}),
    ],
)
def test_a_refusal_repeats_at_most_a_line_of_the_request(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000
    assert all(len(value) < 1000 for value in response.headers.values())


def test_a_prediction_is_refused_without_a_speculator(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {"prediction": {"type": "content", "content": ""}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prediction")
    assert "--speculator auto" in error["message"]


@pytest.mark.parametrize("path", [f"/v1/models/{LONG}", f"/health?deep={LONG}", f"/{LONG}", f"/v1/models?x={LONG}"])
def test_a_refused_get_repeats_at_most_a_line_of_its_target(http: httpx.Client, path: str) -> None:
    assert len(http.get(path).content) < 1000


def test_a_trailing_slash_is_not_found_rather_than_redirected(http: httpx.Client) -> None:
    for path in ("/v1/models/", "/health/", "/v1/completions/"):
        response = http.get(path, headers={"host": "elsewhere.example"}, follow_redirects=False)
        assert "location" not in response.headers
        assert response.status_code >= 400
        assert response.json()["error"]["message"]


def test_a_wrong_method_is_refused_with_the_right_one(http: httpx.Client) -> None:
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "/v1/completions does not accept GET; use POST"


@pytest.mark.parametrize("path", ["/health", "/health?deep=1", "/v1/models", "/v1/models/tiny", "/metrics"])
def test_head_is_answered_as_get_without_the_body(http: httpx.Client, path: str) -> None:
    response = http.head(path)
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["content-type"] == http.get(path).headers["content-type"]


def test_an_excerpt_keeps_both_ends_of_a_long_text() -> None:
    assert excerpt("short") == "short"
    shortened = excerpt("start" + "x" * 1000 + "end")
    assert len(shortened) == 200
    assert shortened.startswith("start")
    assert shortened.endswith("end")


def test_the_reason_of_a_failure_is_not_shortened() -> None:
    reason = "x" * (MAX_MESSAGE + 1)
    assert ApiError(503, reason).message == reason
    assert len(ApiError(400, reason).message) == MAX_MESSAGE


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")]
)
def test_the_type_of_an_error_follows_from_its_status(status: int, kind: str) -> None:
    assert ApiError(status, "why").body()["error"]["type"] == kind
