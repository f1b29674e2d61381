from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from engine.core.config.server import ServerConfig
from engine.core.config.tree import EngineConfig, ExecutorConfig, ModelConfig, ParserConfig
from engine.core.executors.wire import encode

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
FAKE_FRONT_END = Path(__file__).with_name("fake_front_end.py")
FAKE_SERVER = Path(__file__).with_name("fake_server.py")


class RunningServer:
    """A server process, observed from outside."""

    def __init__(self, command: Sequence[str], directory: Path | None = None) -> None:
        """directory: for the server's temporary files."""
        self.directory = directory
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"TMPDIR": str(directory)} if directory else {})
        # Rather than a pipe: what was written can be read immediately.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `kill`)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._text = self.output = ""
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            self.output += line
            if line.startswith("Listening on "):
                self.url = line.split()[-1]
                break
        else:
            self.process.wait(30)

    @property
    def errors(self) -> str:
        """The server's standard error so far."""
        if self._errors.closed:
            return self._text
        file = self._errors.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)

    @contextlib.contextmanager
    def asked(
        self,
        body: Any,
        tls: ssl.SSLContext | None = None,
        *,
        path: str = "completions",
        until: bytes = b"",
        headers: Mapping[str, str] = {},
    ) -> Iterator[None]:
        """An answer asked for on a connection that closes at the end, whatever has come. until: wait for this text."""
        host, _, port = self.url.partition("://")[2].rpartition(":")
        data = json.dumps(body).encode()
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            if tls is not None:
                connection = stack.enter_context(tls.wrap_socket(connection, server_hostname=host))
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            connection.sendall(head.encode() + b"\r\n" + data)
            came = b""
            while until not in came:
                more = connection.recv(2**16)
                assert more, came
                came += more
            yield

    def metrics(self, get: Callable[..., httpx.Response] = httpx.get, **options: Any) -> dict[str, float]:
        """The samples of /metrics, of each replica and summed over all; get: the function that asks for them.

        Keys are names with labels, as in the text, but for the model's name.
        """
        lines = get(f"{self.url}/metrics", timeout=30, **options).text.splitlines()
        found: dict[str, float] = {}
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#")):
            of_replica = re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "")
            total = re.sub(r',?replica="\d+"', "", of_replica).replace("{,", "{").replace("{}", "")
            found[total] = found.get(total, 0.0) + float(value)
            if total != of_replica:
                found[of_replica] = float(value)
        return found

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until `condition` holds; fail after `seconds`. A connection that breaks counts as not yet."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if condition():
                    return
            assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s\n{self.errors}"
            time.sleep(0.02)

    def leftovers(self) -> list[Path]:
        """The servers' own directories that still exist."""
        assert self.directory is not None
        return list(self.directory.glob("engine-*"))

    def children(self) -> dict[int, str]:
        """The command line of each child process, by process ID."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        own = Path(f"/proc/{self.process.pid}/cmdline").read_text()
        found = {}
        for child in listed:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                command = Path(f"/proc/{child}/cmdline").read_text()
                if command not in ("", own):  # else it has ended, or does not run its own program yet
                    found[int(child)] = command
        return found

    def engine_pid(self) -> int:
        """Process ID of the only engine process."""
        (found,) = self.engine_pids()
        return found

    def engine_pids(self) -> list[int]:
        """Process IDs of the engine processes, in the order of their start."""
        return [pid for pid, command in self.children().items() if "front_end" not in command]

    def worker_pids(self) -> list[int]:
        """Process IDs of the executor's workers."""
        found: list[int] = []
        for task in Path(f"/proc/{self.engine_pid()}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended since
                found += map(int, (task / "children").read_text().split())
        return found

    def front_end_pids(self) -> list[int]:
        """Process IDs of the front ends."""
        return [pid for pid, command in self.children().items() if "front_end" in command]

    def connections(self) -> dict[int, int]:
        """Number of TCP connections that each front end holds, by process ID; also those that the client has closed."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port)}
        held = dict.fromkeys(self.front_end_pids(), 0)
        for pid in held:
            with contextlib.suppress(OSError):  # it has ended since
                for descriptor in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):  # closed since
                        held[pid] += os.readlink(f"/proc/{pid}/fd/{descriptor}") in sockets
        return held

    @contextlib.contextmanager
    def client_per_front_end(self, count: int = 2) -> Iterator[list[httpx.Client]]:
        """`count` clients, each with a connection to another of the server's `count` front ends.

        A new connection goes to the front end that has fewest, counting those that it has not closed yet.
        """
        clients: list[httpx.Client] = []

        def are_even() -> bool:
            held = list(self.connections().values())
            return held == held[:1] * count

        def have_one_each() -> bool:
            for client in clients:
                client.close()
            clients.clear()
            if not are_even():
                return False
            clients.extend(self.client() for _ in range(count))
            for client in clients:
                client.get("/health")
            return are_even()

        try:
            self.until(have_one_each)
            yield clients
        finally:
            for client in clients:
                client.close()

    def stop(self) -> int:
        """Send SIGTERM and wait; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._text = self.errors
        self._errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Gate:
    """A file that holds requests of the fake engine after their first token; see fake_engine.py."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()
        self.options = {"hold": str(file)}
        """Options of an engine all of whose requests are held."""
        self.prompt = f"hold {file}"
        """Prompt of a request that is held."""

    def open(self) -> None:
        """Let the requests go on."""
        self._file.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Holds requests until `gate.open()`."""
    return Gate(tmp_path / "gate")


def process_lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="session")
def alive() -> Callable[[int], bool]:
    """Whether a process ID belongs to a running process."""
    return process_lives


@pytest.fixture(scope="session")
def fake_config() -> Callable[..., EngineConfig]:
    """Makes a configuration for the fake engine: `options` configure the engine, other arguments ServerConfig.

    The device is a CPU, so that several replicas need no GPUs. An idle engine computes no steps, which tests count.
    """

    def make(
        options: dict[str, Any] | None = None, tokenizer: str = "", parser: str = "auto", **server: Any
    ) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(path="/somewhere/tiny", tokenizer=tokenizer),
            executor=ExecutorConfig(device="cpu", options=options or {}),
            parser=ParserConfig(name=parser, options={"reasoning": True} if parser != "auto" else {}),
            server=attrs.evolve(ServerConfig(port=0, api_workers=1, health_interval=0.0), **server),
        )

    return make


@pytest.fixture(scope="session")
def fake_command() -> list[str]:
    """Command line that starts the fake engine process."""
    return [sys.executable, "-P", str(FAKE_ENGINE)]


@pytest.fixture(scope="session")
def serve_fake(
    fake_config: Callable[..., EngineConfig], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """A context manager that runs a real server with the fake engine; arguments as for `fake_config`.

    descriptors: the limit of open files of its processes.
    """

    @contextlib.contextmanager
    def start(*, descriptors: int | None = None, **kwargs: Any) -> Iterator[RunningServer]:
        directory = tmp_path_factory.mktemp("serve")
        file = directory / "config"
        file.write_bytes(encode(fake_config(**kwargs)))
        command = [sys.executable, "-P", *map(str, (FAKE_SERVER, file, FAKE_ENGINE, FAKE_FRONT_END))]
        if descriptors is not None:
            command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
        server = RunningServer(command, directory)
        try:
            yield server
        finally:
            server.kill()

    return start


@pytest.fixture(scope="session")
def server(serve_fake: Callable[..., contextlib.AbstractContextManager[RunningServer]]) -> Iterator[RunningServer]:
    """A server for all tests that need no settings of their own and leave nothing behind but counts."""
    limits = {"max_body_bytes": 100_000, "max_prompts": 3, "max_stop": 2, "max_logit_bias": 2}
    with serve_fake(**limits, options={"delay": 0.002}) as running:
        yield running
        assert running.stop() == 0
        assert "ERROR" not in running.errors


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts a server from its command line and waits until it listens or has exited; see RunningServer."""
    started: list[RunningServer] = []

    def start(command: Sequence[str], directory: Path | None = None) -> RunningServer:
        started.append(RunningServer(command, directory))
        return started[-1]

    yield start
    for server in started:
        server.kill()
