"""The compile server's children: how long they may take, and that none is left. In another process, since it forks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, time
from multiprocessing.connection import Pipe
from engine.core.compilation import server

server.Server._compile_and_exit = lambda *_: time.sleep(100)
ours, theirs = Pipe()
ours.send_bytes((7).to_bytes(server.NUMBER_BYTES) + b"a job")
serving = server.Server(theirs, 1, None)
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_compilation_that_takes_too_long_is_killed_and_answered() -> None:
    [answer] = run(
        """
server.MAX_COMPILE_SECONDS = 0.1
ours.send_bytes(b"")
serving.run()
print(ours.recv_bytes()[server.NUMBER_BYTES:].decode())
"""
    )
    assert answer == "the compiler was ended by signal 9"


def test_no_child_is_left_when_the_connection_ends() -> None:
    assert run(
        """
ours.close()
try:
    serving.run()
except SystemExit:
    print(len(serving._children))
    serving.kill_children()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none left")
"""
    ) == ["1", "none left"]
