"""`engine profile trace` of an offline load, and what it says when it cannot ask a server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scripted_server import Answer, scripted_server


def test_an_offline_load_is_recorded(run: Any, engine_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.trace.json.gz"
    result = run(
        *("profile", "trace", str(engine_checkpoint), "--steps", "3", "--after", "2", "--batch", "2"),
        *("--input-len", "20", "--output", str(file), "--kv-memory", "8MiB", "--device", "cpu", "--threads", "1"),
    )
    assert result.exit_code == 0, result.output
    assert "3 steps of 2 processes (engine, rank 0)" in result.stdout
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"decode 2", "schedule"} <= names


def test_settings_of_the_engine_are_refused_for_a_running_server(run: Any) -> None:
    result = run("profile", "trace", "--url", "http://localhost:1", "--max-running", "3")
    assert result.exit_code == 2
    assert "scheduler.max_running (by --max-running) is a setting of the server" in result.stderr


def test_a_server_records_its_steps_without_a_proxy_when_it_is_on_this_machine(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    report = {
        "steps": 3,
        "processes": ["engine"],
        "events": 9,
        "clock_error_us": 1.0,
        "cut": [],
        "path": "a.json.gz",
        "bytes": 1,
    }
    with scripted_server() as server:
        server.answers = [replied({"replica": 0}), replied({"replica": 0, **report})]
        result = run("profile", "trace", "--url", f"{server.url}/v1/", "--admin-api-key", "secret", "--steps", "3")
    assert result.exit_code == 0, result.stderr
    assert "3 steps of 1 processes (engine): 9 events" in result.stdout
    assert [body.get("steps") for body in server.asked] == [3, None]
    assert set(server.keys) == {"Bearer secret"}


def test_what_is_not_the_url_of_a_server_is_refused(run: Any) -> None:
    result = run("profile", "trace", "--url", "localhost")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --url 'localhost' is not the URL of a server; give one as http://localhost:8000\n",
    )


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (Answer(body=b"<html>"), 1, "the server answered /start_profile with '<html>'..., which is not a JSON object"),
        (Answer(body=b"{}"), 1, "the answer to /start_profile is not that of `engine serve`; check --url"),
        (Answer(status=401, body=b'{"error": {"message": "no key"}}'), 2, "no key (--admin-api-key, or"),
        (Answer(status=503, body=b'{"error": {"message": "busy"}}'), 1, "the server answered 503: busy"),
    ],
    ids=["not JSON", "another server", "no key", "busy"],
)
def test_an_answer_without_a_trace_is_one_sentence(run: Any, answer: Answer, status: int, said: str) -> None:
    with scripted_server() as server:
        server.answers = [answer]
        result = run("profile", "trace", "--url", server.url)
    assert result.exit_code == status
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_admin_key_stays_with_the_server_that_the_user_named_when_it_redirects(run: Any) -> None:
    with scripted_server() as server, scripted_server() as other:
        server.answers = [Answer(status=302, headers=(("location", f"{other.url}/x"),), finish=None)]
        result = run("profile", "trace", "--url", server.url, "--admin-api-key", "secret")
    assert result.exit_code == 2
    assert f"it has moved to {other.url}/x; give that as --url" in result.stderr
    assert other.keys == []


def test_a_server_that_does_not_answer_is_reported(run: Any) -> None:
    with scripted_server() as server:
        url = server.url
    result = run("profile", "trace", "--url", url)
    assert (result.exit_code, result.stderr) == (1, f"error: {url} cannot be reached: Connection refused\n")


def replied(answer: dict[str, Any]) -> Answer:
    """The answer of an only replica."""
    return Answer(body=json.dumps({"replicas": [answer]}).encode(), kind="application/json")
