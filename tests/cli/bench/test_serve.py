"""`engine bench serve`: levels of load, their statistics, and a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.cli.bench import server_process
from engine.cli.bench.serve import LoadLevel, _given, levels_of, processes_for, served_config
from engine.cli.bench.server_process import Server, cpu_seconds
from engine.core.config.load import load_config
from engine.core.errors import ConfigError, InvalidRequestError

LOAD = LoadLevel(concurrency=5, requests=13, input_len=4, output_len=3, vocab_size=64, processes=3, seed=1, timeout=5.0)


def test_processes_share_the_load() -> None:
    server = Server(host="h", port=1, model="m", pid=None)
    jobs = LOAD.jobs(server, "key")
    assert [job.connections for job in jobs] == [2, 2, 1]
    assert [job.requests for job in jobs] == [5, 4, 4]
    assert len({job.seed for job in jobs}) == 3
    for few in (attrs.evolve(LOAD, concurrency=2), attrs.evolve(LOAD, requests=2, concurrency=0, rate=6.0)):
        assert [bool(job.requests and (job.connections or job.rate)) for job in few.jobs(server, "")] == [True, True]
    assert sum(job.rate for job in attrs.evolve(LOAD, concurrency=0, rate=6.0).jobs(server, "")) == pytest.approx(6)
    assert (jobs[0].output_len, jobs[0].vocab_size, jobs[0].api_key) == (3, 64, "key")
    assert processes_for(1) == 1
    assert 1 <= processes_for(256) <= 8


def test_levels_are_concurrencies_or_rates() -> None:
    assert levels_of(None, None) == [(1, 0.0), (64, 0.0), (256, 0.0)]
    assert levels_of("2,4", None) == [(2, 0.0), (4, 0.0)]
    assert levels_of(None, "0.5,3") == [(0, 0.5), (0, 3.0)]
    for wrong in ("x", "0", "1,-2", "inf", "nan", ""):
        with pytest.raises(ConfigError, match="--rate"):
            levels_of(None, wrong)


def test_a_url_with_a_path_is_refused_with_the_url_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"has a path.*give the URL of the server itself, as http://gateway:81$"):
        Server.at("http://gateway:81/llm", "", None)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_v1(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"/health": (200, b""), "/v1/models": (200, b'{"data": [{"id": "m"}]}')}
    monkeypatch.setattr(server_process, "get", lambda host, port, path, key: answers[path])
    assert Server.at(f"http://gateway:81{path}", "", None).url == "http://gateway:81"


def test_a_server_of_its_own_gets_a_free_port_unless_one_is_named() -> None:
    assert served_config(load_config()).server.port == 0
    assert served_config(load_config(overrides={"server.port": "8123"})).server.port == 8123


@pytest.mark.parametrize("url", ["localhost:8000", "http://a:b", "http://a b:80", "http://[::1", "http://"])
def test_what_is_not_the_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not the URL of a server"):
        Server.at(url, "", None)


def test_a_server_that_is_served_by_https_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not served by http; give one as http://"):
        Server.at("https://localhost", "", None)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"data": []}', b'{"data": [{"name": "m"}]}'])
def test_a_server_that_does_not_name_its_model_is_refused(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(server_process, "get", lambda *_: (200, body))
    with pytest.raises(ConfigError, match=r"http://localhost:1 does not name its model; is it `engine serve`\?"):
        Server.at("http://localhost:1", "", None)


def test_the_url_of_a_server_has_brackets_when_the_host_is_an_ipv6_address() -> None:
    assert Server(host="::1", port=1, model="m", pid=None).url == "http://[::1]:1"


def test_cpu_time_is_that_of_the_process_and_its_children() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn + chr(10) + 'input()'!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while (used := cpu_seconds(process.pid)) < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        own = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert used > (int(own[11]) + int(own[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        process.communicate(b"\n")
    with pytest.raises(ConfigError, match="--server-pid"):
        cpu_seconds(process.pid)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--url", "http://127.0.0.1:9", "--kernels", "plain"], "executor.kernels (by --kernels) is a setting"),
        (["--server-pid", "1"], "--server-pid needs --url"),
        (["--concurrency", "1", "--rate", "2"], "exclude each other"),
        (["--url", "127.0.0.1:9"], "--url '127.0.0.1:9' is not the URL of a server"),
        (["--slo-ttft", "nan"], "--slo-ttft nan is not above 0 and finite"),
        (["--timeout", "-1"], "--timeout -1 is not above 0 and finite"),
        (["--bandwidth", "0"], "--bandwidth 0 is not above 0 and finite"),
    ],
)
def test_options_that_exclude_each_other_or_make_no_sense_are_refused(run: Any, options: list[str], error: str) -> None:
    done = run("bench", "serve", *options)
    assert done.exit_code == 2
    assert error in done.stderr


def test_a_report_names_what_was_given_but_no_secret() -> None:
    given = {"server.admin_api_key": (["secret"], "--set"), "server.port": (8001, "--set")}
    assert _given(load_config(overrides=given)) == {"server.port": "8001"}


@pytest.mark.e2e
def test_serve_measures_a_real_server_under_load(run: Any, flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = [
        "--concurrency",
        "1,3",
        "--requests",
        "6",
        "--input-len",
        "6",
        "--output-len",
        "5",
        "--load-processes",
        "2",
        "--max-len",
        "64",
    ]
    options += ["--slo-ttft", "60000", "--slo-tpot", "60000", "--json", str(file)]
    done = run("bench", "serve", *flags, *options)
    assert done.exit_code == 0, done.stderr
    written = json.loads(file.read_text())
    rows = {(row["metric"], row["case"]): row for row in written["rows"]}
    for case in ("concurrency 1", "concurrency 3"):
        assert rows["errors", case]["value"] == 0, done.stderr
        assert rows["requests", case]["value"] == 6
        assert rows["output tokens a second", case]["value"] > 0
        assert 0 < rows["output tokens a second", case]["share"] < 1
        assert rows["goodput", case]["value"] == pytest.approx(rows["requests a second", case]["value"])
        assert rows["CPU cores of the server", case]["value"] > 0
        assert 0 < rows["TPOT p50", case]["value"] < rows["TTFT p50", case]["value"] * 100
    assert written["settings"]["model"] == "tiny"
    assert written["settings"]["given"]["model.max_len"] == "64"


@pytest.mark.e2e
def test_a_server_that_cannot_start_is_an_error(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 64, "architectures": ["Unheard"]}')
    done = run("bench", "serve", "--model", str(tmp_path))
    assert done.exit_code == 1
    assert "the server did not start" in done.stderr
