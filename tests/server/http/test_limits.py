"""Limits of each API key on a real server with several front ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.shared.limits_table import LimitsTable

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def post(server: Any, key: str = "none", body: dict[str, Any] = COMPLETION) -> httpx.Response:
    """A request on a connection of its own, so that it may reach any front end."""
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)


def check_refusal(response: httpx.Response, setting: str) -> int:
    """Check a 429; its Retry-After."""
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert setting in error["message"]
    return int(response.headers["retry-after"])


def test_each_key_has_its_own_rate_across_front_ends_and_wrong_ones_use_up_none(serve_fake: Serve) -> None:
    with serve_fake(rate_limit=5, api_key=("a", "b"), api_workers=2) as server:
        for _ in range(3):
            assert post(server, "wrong").status_code == 401
            assert httpx.post(f"{server.url}/health", timeout=30).status_code == 405
        for key in ("a", "b"):
            assert [post(server, key).status_code for _ in range(5)] == [200] * 5
            for _ in range(3):
                assert 1 <= check_refusal(post(server, key), "server.rate_limit") <= 72
        assert (
            httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer a"}, timeout=30).status_code == 200
        )


def test_without_keys_all_clients_count_as_one(serve_fake: Serve) -> None:
    with serve_fake(rate_limit=2) as server:
        assert [post(server, key).status_code for key in "xyz"] == [200, 200, 429]


def test_each_key_has_its_own_requests_in_progress(serve_fake: Serve, gate: Any) -> None:
    held = COMPLETION | {"prompt": gate.prompt, "stream": True}
    with serve_fake(concurrency_limit=2, api_key=("a", "b"), api_workers=2) as server:
        with ExitStack() as stack:
            for _ in range(2):
                headers = {"authorization": "Bearer a"}
                asked = httpx.stream("POST", f"{server.url}/v1/completions", json=held, headers=headers, timeout=30)
                lines = stack.enter_context(asked).iter_lines()
                stack.callback(lines.close)
                next(lines)
            assert check_refusal(post(server, "a"), "server.concurrency_limit") == 1
            assert post(server, "b").status_code == 200
        server.until(lambda: post(server, "a").status_code == 200)


def test_a_killed_front_end_leaves_nothing_in_progress(serve_fake: Serve, gate: Any) -> None:
    held = COMPLETION | {"prompt": gate.prompt, "stream": True}
    with serve_fake(concurrency_limit=1) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=held, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            assert post(server).status_code == 429
            (front_end,) = server.front_end_pids()
            os.kill(front_end, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        server.until(lambda: server.front_end_pids() not in ([], [front_end]))
        assert post(server).status_code == 200


@pytest.fixture
def tables(tmp_path: Path) -> list[LimitsTable]:
    """The same table seen by two front ends."""
    LimitsTable.create(tmp_path / "limits", front_ends=2, keys=2)
    return [LimitsTable.map(tmp_path / "limits", 2, 2, row) for row in range(2)]


def test_the_rate_is_that_of_a_sliding_minute(tables: list[LimitsTable]) -> None:
    first, second = tables
    for table in (first, second, first, second):
        assert table.seconds_until(0, 4, 630.0) == 0
        table.begin(0, 630.0)
    assert first.seconds_until(1, 4, 630.0) == 0  # the other key
    wait = second.seconds_until(0, 4, 630.0)
    assert wait == pytest.approx(45)  # 3/4 of the requests of the minute that ends at 660 count at 675
    assert second.seconds_until(0, 4, 630.0 + wait - 0.1) > 0
    assert second.seconds_until(0, 4, 630.0 + wait + 0.1) == 0
    second.begin(0, 676.0)
    assert first.seconds_until(0, 4, 677.0) == pytest.approx(690 - 677)
    assert first.seconds_until(0, 4, 900.0) == 0


def test_a_rate_of_one_per_minute_admits_one_per_minute(tables: list[LimitsTable]) -> None:
    first, second = tables
    first.begin(0, 600.0)
    assert second.seconds_until(0, 1, 601.0) == pytest.approx(59 + 60)


def test_requests_in_progress_are_counted_across_front_ends(tables: list[LimitsTable], tmp_path: Path) -> None:
    first, second = tables
    first.begin(0, 1.0)
    second.begin(0, 1.0)
    assert (first.active(0), second.active(0), first.active(1)) == (2, 2, 0)
    second.end(0)
    assert first.active(0) == 1
    LimitsTable.map(tmp_path / "limits", 2, 2, 0)  # the successor of the first
    assert second.active(0) == 0
