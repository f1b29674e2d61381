"""`engine profile phases`: shares from two scrapes, and the command on a server that answers as scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.cli.metrics.scrape import Interval, Scrape
from engine.cli.metrics.shares import of_request, of_step, three_shares

ENGINE = {"schedule": 1.0, "submit": 6.0, "wait": 0.5, "commit": 1.0, "prepare": 1.0, "launch": 3.0, "sample": 1.0}
FRONT_END = {"http": 1.0, "tokenize": 0.5, "write": 0.5}


def metrics(engine: dict[str, float], front_end: dict[str, float], scale: float = 1.0, replicas: int = 1) -> str:
    lines = []
    for number in range(replicas):
        label = f'replica="{number}",' if replicas > 1 else ""
        lines += [f"engine_up{{{label}}} 1", f"engine_steps_total{{{label}}} {100 * scale / replicas}"]
        lines += [
            f'engine_phase_seconds_total{{{label}phase="{name}"}} {value * scale / replicas}'
            for name, value in (engine | {"receive": 0.3, "send": 0.2}).items()
        ]
    lines += [f'engine_front_end_seconds_total{{phase="{name}"}} {value * scale}' for name, value in front_end.items()]
    lines += [
        f'engine_requests_finished_total{{finish_reason="stop"}} {5 * scale}',
        f"engine_request_queue_time_seconds_sum {2 * scale}",
        f'engine_gc_seconds_count{{process="engine",generation="1"}} {4 * scale}',
        f'engine_gc_seconds_sum{{process="engine",generation="1"}} {0.02 * scale}',
    ]
    return "\n".join(lines) + "\n"


def interval(engine: dict[str, float] = ENGINE, front_end: dict[str, float] = FRONT_END, **options: Any) -> Interval:
    """20 s in which the server did once what it had done before."""
    cpu = {"front end": 4.0, "engine": 9.0}
    before = Scrape.of(metrics(engine, front_end, **options), dict.fromkeys(cpu, 0.0), 100.0)
    return Interval(before, Scrape.of(metrics(engine, front_end, 2.0, **options), cpu, 120.0))


@pytest.mark.parametrize("replicas", [1, 2])
def test_phases_of_a_step_and_the_idle_time_add_up(replicas: int) -> None:
    rows = {row.phase: row for row in of_step(interval(replicas=replicas))}
    assert rows["submit"].seconds == pytest.approx(6.0)
    assert rows["idle"].seconds == pytest.approx(20 * replicas - 9.0)
    assert sum(row.share for row in rows.values() if row.share is not None) == pytest.approx(1.0)
    assert (rows["launch"].process, rows["launch"].share) == ("engine, in submit", None)


def test_phases_of_the_runner_are_a_workers_when_submit_is_shorter() -> None:
    rows = {row.phase: row for row in of_step(interval(ENGINE | {"submit": 0.5, "wait": 6.0}))}
    assert rows["launch"].process == "worker"


def test_phases_of_the_runner_are_in_submit_though_its_end_is_outside_the_interval() -> None:
    """A step that had ended its launch, and whose submit had not ended, when the interval did."""
    short = ENGINE | {"submit": ENGINE["submit"] / 8}
    before = Scrape.of(metrics(ENGINE, FRONT_END), {}, 100.0)
    after = {name: ENGINE[name] + value / 8 for name, value in short.items()} | {"launch": ENGINE["launch"] * 1.3}
    rows = {row.phase: row for row in of_step(Interval(before, Scrape.of(metrics(after, FRONT_END), {}, 101.0)))}
    assert rows["launch"].seconds > rows["submit"].seconds
    assert rows["launch"].process == "engine, in submit"


def test_shares_of_a_request_are_of_all_processes_without_the_queue() -> None:
    rows = {row.phase: row for row in of_request(interval())}
    assert rows["http"].share == pytest.approx(1 / 11)
    assert rows["submit"].share == pytest.approx(6 / 11)
    assert (rows["queue"].seconds, rows["queue"].share) == (2.0, None)


def test_three_shares_count_every_second_once_without_workers() -> None:
    shares = three_shares(interval())
    assert shares is not None
    assert (shares.http, shares.scheduling, shares.device) == pytest.approx((2.5, 1 + 1 + 1 + 1, 3 + 1 + 0.5))
    assert shares.http + shares.scheduling + shares.device == pytest.approx(11.0)


def test_three_shares_count_every_second_once_with_workers() -> None:
    shares = three_shares(interval(ENGINE | {"submit": 0.5, "wait": 6.0}))
    assert shares is not None
    assert (shares.http, shares.scheduling, shares.device) == pytest.approx((2.5, 1 + 0.5 + 1 + 1, 5.0))
    assert shares.shares["device"] == pytest.approx(5 / 11)


def test_three_shares_use_the_cpu_time_of_front_ends_that_do_not_measure_theirs() -> None:
    without = interval(front_end={})
    assert three_shares(without) is None
    used = 'process_cpu_seconds_total{{process="front_end",number="0"}} {}\n'
    before = Scrape.of(metrics(ENGINE, {}) + used.format(1.0), {}, 100.0)
    after = Scrape.of(metrics(ENGINE, {}, 2.0) + used.format(5.0), {}, 120.0)
    shares = three_shares(Interval(before, after))
    assert shares is not None
    assert shares.http == pytest.approx(4.5)


@pytest.fixture
def server() -> Iterator[str]:
    """A server whose counters double between two scrapes."""
    scrapes = iter([1.0, 2.0])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"ok"
            if self.path == "/v1/models":
                body = b'{"data": [{"id": "small"}]}'
            elif self.path == "/metrics":
                body = metrics(ENGINE, FRONT_END, next(scrapes)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join(5)


def test_a_running_server_is_watched(run: Any, server: str, tmp_path: Path) -> None:
    file = tmp_path / "phases.json"
    done = run("profile", "phases", "--url", server, "--seconds", "0.1", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert "A step (100 steps" in done.stdout
    assert "A request (5 finished)" in done.stdout
    assert "Garbage collections" in done.stdout
    rows = {(row["metric"], row["case"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["time per step", "engine: submit"] == pytest.approx(60.0)
    assert rows["time per request", "front end: http"] == pytest.approx(200.0)
    assert rows["share", "HTTP"] == pytest.approx(2.5 / 11)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--pid", "1"], "--pid needs --url"),
        (["--url", "http://127.0.0.1:9", "--tp", "2"], "executor.tensor_parallel (by "),
        (["--url", "127.0.0.1:9"], "is not the URL of a server"),
    ],
)
def test_what_cannot_be_watched_is_refused(run: Any, options: list[str], error: str) -> None:
    done = run("profile", "phases", *options)
    assert done.exit_code == 2
    assert error in done.stderr
