"""Measures what hostile clients without a key do to others: the worst gap in another stream, and the memory they take.

    python benchmarks/hostile_clients.py [--megabytes 40] [--cases one-header,url] [--json FILE]

Each case has a fresh server: the stand-in engine of benchmarks/server.py, which yields a token every 20 ms, and one
front end. A well-behaved stream runs throughout; the longest time between two of its events is the case's cost to
others. A gap of some 20 ms is the engine's own pace.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

SERVER = Path(__file__).with_name("server.py")
STREAM = {"model": "bench", "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
REQUEST_LINE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = REQUEST_LINE + b"Transfer-Encoding: chunked\r\n\r\n"
CASES = {
    "one-header": (REQUEST_LINE + b"x: ", b"x"),
    "small-headers": (REQUEST_LINE, b"a:%d\r\n" % (10**9)),
    "url": (b"GET /", b"x"),
    "trailers": (CHUNKED + b"0\r\n", b"x: y\r\n"),
    "one-trailer": (CHUNKED + b"0\r\nx: ", b"x"),
    "chunk-extension": (CHUNKED + b"1;x=", b"x"),
    "blank-lines": (b"", b"\r\n"),
    "pipelined": (b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}
"""How a request begins, and what is then repeated without an end."""
DESCRIPTORS = 1024
"""Limit of open files in the case of many connections."""


@attrs.define
class Result:
    """What one case did."""

    case: str
    answer: str
    """The first line that the hostile client received."""
    worst_gap: float
    """Longest time between two events of the other stream, seconds."""
    peak_growth: float
    """Growth of the front end's peak memory, MiB."""


class Stream:
    """A well-behaved stream, read in a thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        body = json.dumps(STREAM).encode()
        self._socket = connect(address)
        self._socket.sendall(REQUEST_LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._socket.recv(1 << 16)
        self._last = time.monotonic()
        self._worst = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def restart_clock(self) -> None:
        """Forget the gaps so far."""
        self._worst = 0.0

    def worst_gap(self) -> float:
        """The longest gap so far, seconds, including one that has not ended."""
        return max(self._worst, time.monotonic() - self._last)

    def _read(self) -> None:
        while self._socket.recv(1 << 16):
            now = time.monotonic()
            self._worst = max(self._worst, now - self._last)
            self._last = now


def connect(address: tuple[str, int]) -> socket.socket:
    """A connection whose calls take at most a minute."""
    return socket.create_connection(address, timeout=60)


def send_forever(address: tuple[str, int], begin: bytes, repeated: bytes, size: int) -> str:
    """Send `size` bytes of an endless request; the first line of the answer, or why there is none."""
    block = repeated * (2**20 // len(repeated))
    with connect(address) as connection:
        try:
            connection.sendall(begin)
            for _ in range(size // len(block)):
                connection.sendall(block)
            connection.settimeout(2)
            return connection.recv(1000).partition(b"\r\n")[0].decode() or "closed"
        except OSError as error:
            return type(error).__name__


def open_many(address: tuple[str, int], stream: Stream) -> str:
    """Open more connections than there are descriptors; whether /health answers meanwhile and afterwards."""
    connections = [connect(address) for _ in range(DESCRIPTORS + 100)]
    time.sleep(1)
    meanwhile = health(address)
    for connection in connections:
        connection.close()
    time.sleep(1)
    return f"/health during: {meanwhile}, afterwards: {health(address)}"


def health(address: tuple[str, int]) -> str:
    """The status of GET /health, or why there is none."""
    try:
        with connect(address) as connection:
            connection.settimeout(3)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(1000)[9:12].decode() or "closed"
    except OSError as error:
        return type(error).__name__


def peak_memory(pid: int) -> float:
    """Peak resident memory of a process so far, MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def front_end(server: int) -> int:
    """Process ID of the only front end."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(each) for each in children if b"front_end" in Path(f"/proc/{each}/cmdline").read_bytes())


def measure(case: str, size: int) -> Result:
    """Run one case against a fresh server."""
    command = [sys.executable, "-P", str(SERVER), "serve", "--workers", "1"]
    if case == "connections":
        command = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[-1] for line in server.stdout if line.startswith("Listening on"))
            host, _, port = url.removeprefix("http://").rpartition(":")
            address, pid = (host, int(port)), front_end(server.pid)
            stream = Stream(address)
            time.sleep(1)
            before = peak_memory(pid)
            stream.restart_clock()
            answer = open_many(address, stream) if case == "connections" else send_forever(address, *CASES[case], size)
            time.sleep(0.2)
            return Result(case, answer, stream.worst_gap(), peak_memory(pid) - before)
        finally:
            server.kill()  # its children exit by themselves


def results(cases: list[str], size: int) -> Iterator[Result]:
    """Run the cases one after another."""
    for case in cases:
        result = measure(case, size)
        print(
            f"{case:16} {result.worst_gap * 1e3:8.0f} ms  {result.peak_growth:8.1f} MiB   {result.answer}", flush=True
        )
        yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, "connections"]
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--cases", default=",".join(names))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'case':16} {'worst gap':>11} {'peak memory':>12}   answer")
    found = list(results(options.cases.split(","), options.megabytes * 2**20))
    if options.json is not None:
        options.json.write_text(json.dumps([attrs.asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
