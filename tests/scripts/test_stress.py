"""The scripts in scripts/stress/: short runs against the real server, and what they find in a bad one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

STRESS = Path(__file__).resolve().parents[2] / "scripts" / "stress"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the scripts read /proc")


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(STRESS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STRESS))


class BadServer(BaseHTTPRequestHandler):
    """Names its model, has metrics, and fails with a traceback at everything else."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, b'engine_kv_blocks{state="used"} 3.0\n')
        elif self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": "bad", "max_model_len": 64}]}).encode())
        else:
            self._answer(200, b"{}")

    def do_POST(self) -> None:
        self._answer(500, b"Traceback (most recent call last): ...")

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def bad_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BadServer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_the_corpus_reports_what_a_bad_server_does(bad_server: str) -> None:
    from cases import cases  # type: ignore[import-not-found]
    from corpus_bodies import VALID  # type: ignore[import-not-found]
    from corpus_framing import KEYS  # type: ignore[import-not-found]
    from wire import Target, exchange, used_blocks  # type: ignore[import-not-found]

    target = Target.at(bad_server, "secret")
    assert used_blocks(target) == 3
    (valid,) = cases(VALID, target, 1, seed=0)
    assert "expected ok: status 500" in valid.fault(exchange(target, *valid.parts))
    wrong_keys = [one.fault(exchange(target, *one.parts)) for one in cases(KEYS, target, 12, seed=0)]
    assert any("expected refused: status 200" in fault for fault in wrong_keys)


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (400, b'{"error": {"message": "no", "type": "invalid_request_error"}}', ""),
        (400, b"no", "not in OpenAI's shape"),
        (400, b'{"error": {"message": "' + b"x" * 5000 + b'", "type": "a"}}', "echoes what was sent"),
        (200, b"{}", "expected refused"),
        (500, b"", "expected refused"),
        (503, b'{"error": {"message": "full", "type": "a", "code": "overloaded"}}', ""),
        (503, b'{"error": {"message": "dead", "type": "a", "code": "engine_failed"}}', "expected refused"),
        (0, b"", "closed without an answer"),
        (-1, b"", "no answer in time"),
    ],
)
def test_a_case_judges_an_answer(status: int, body: bytes, fault: str) -> None:
    from cases import Case
    from wire import Answer

    found = Case("a case", (b"",)).fault(Answer(status, b"", body))
    assert fault in found
    assert bool(fault) == bool(found)


def test_cases_follow_from_the_seed() -> None:
    from cases import cases
    from corpus_bodies import TYPES
    from corpus_framing import DISCONNECTS, FRAMING
    from wire import Target

    target = Target("127.0.0.1", 1, "", "m", 100)
    for makers in (TYPES, FRAMING, DISCONNECTS):
        first, again, other = ([one.parts for one in cases(makers, target, 80, seed)] for seed in (1, 1, 2))
        assert first == again != other


def test_requests_name_the_host_as_http_writes_it_when_it_is_an_ipv6_address() -> None:
    from cases import cases
    from corpus_framing import LINES
    from wire import Target

    target = Target("::1", 80)
    assert b"\r\nHost: [::1]:80\r\n" in target.get("/health")
    made = [b"".join(part for part in one.parts if isinstance(part, bytes)) for one in cases(LINES, target, 40, seed=0)]
    assert any(b"\r\nHost: [::1]:80\r\n" in request for request in made)
    assert not any(b"Host: ::1" in request for request in made)


def test_only_local_servers_are_stressed() -> None:
    done = run_script("hostile.py", "http://example.test:80")
    assert done.returncode == 2
    assert "is not the address of a local server" in done.stderr


def test_slopes_and_faults_of_a_soak_are_found() -> None:
    from soak import MIB, faults, slopes  # type: ignore[import-not-found]

    def at(minute: float, memory: float, threads: int) -> dict[str, Any]:
        used = {"memory": memory * MIB, "descriptors": 10, "threads": threads}
        return {"time": minute * 60, "processes": {"engine": used}, "blocks": {}}

    steady = [at(minute, 300 + minute % 2, 4) for minute in range(60)]
    assert abs(slopes(steady, 0.3)["engine"]) < MIB
    assert faults(steady, 0.3, 8) == []
    growing = [at(minute, 300 + 2 * minute, 4 + minute) for minute in range(60)]
    assert slopes(growing, 0.3)["engine"] == pytest.approx(120 * MIB)
    assert [words.split()[1] for words in faults(growing, 0.3, 8)] == ["memory", "threads"]


def test_a_kill_schedule_has_every_kind_equally_often() -> None:
    from kill_schedule import ROLES, schedule  # type: ignore[import-not-found]

    count = 6 * sum(map(len, ROLES.values()))
    rounds = schedule(list(ROLES), count, seed=3)
    assert len(set(rounds)) == len(rounds) == count
    assert schedule(list(ROLES), 10, seed=3) == schedule(list(ROLES), 10, seed=3)


@pytest.mark.e2e
def test_a_killed_front_end_is_replaced_and_a_killed_supervisor_takes_all_with_it(tmp_path: Path) -> None:
    file = tmp_path / "kills.json"
    flags = ["--layouts", "single", "--roles", "supervisor,front end", "--signals", "SIGKILL"]
    flags += ["--rounds", "2", "--seed", "7"]
    flags += ["--load-seconds", "0.3", "--json", str(file)]
    done = run_script("kill_schedule.py", *flags, "--", "--threads", "1", "--kv-memory", "32MiB")
    rounds = json.loads(file.read_text())["rounds"]
    assert len(rounds) == 2, done.stderr
    assert "front end" in rounds[0]["round"]
    assert "supervisor" in rounds[1]["round"]
    assert [one for one in rounds if one["faults"]] == []


@pytest.mark.e2e
def test_a_soak_samples_every_process_and_draws_them(tmp_path: Path) -> None:
    file, picture = tmp_path / "soak.json", tmp_path / "soak.png"
    flags = ["--seconds", "3", "--every", "0.25", "--clients", "4", "--longest", "60", "--slope", "1e9"]
    drawn = [] if _has_no_matplotlib() else ["--plot", str(picture)]
    done = run_script("soak.py", *flags, "--json", str(file), *drawn, "--", "--threads", "1", "--kv-memory", "32MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert set(written["samples"][-1]["processes"]) == {"supervisor", "front end", "engine"}
    assert written["streams"]["finished"] > 0
    assert written["streams"]["left"] > 0
    assert max(one["blocks"]["used"] for one in written["samples"]) > 0
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_a_short_corpus_measures_memory_and_waits(tmp_path: Path) -> None:
    from serving import Server  # type: ignore[import-not-found]

    file = tmp_path / "hostile.json"
    server = Server(["--threads", "1", "--kv-memory", "32MiB", "--max-len", "256", "--api-workers", "1"], tmp_path)
    try:
        flags = ["--requests", "60", "--warm-up", "0", "--groups", "valid,keys,types,disconnects"]
        run_script("hostile.py", server.target.url, *flags, "--json", str(file))
        written = json.loads(file.read_text())
    finally:
        assert server.stop() == 0
    assert server.remains() == []
    assert [group["requests"] for group in written["groups"]] == [4, 8, 21, 9]
    assert not any("500" in group["statuses"] for group in written["groups"])
    assert set(written["after"]) == {"supervisor", "front end", "engine"}
    assert written["blocks_free"]


def _has_no_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is None
