"""The compile server's children: how long they may take, and that none is left. In another process, since it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


LAUNCHERS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from engine.core.compilation.server import one_at_a_time

directory = Path(sys.argv[1])

def make_launcher(source, metadata):
    name = "".join(source.signature.values()) + str(metadata.tensordesc_meta)
    inside = directory / f"inside {name}"
    assert not inside.exists(), "two children make the same launcher"
    inside.touch()
    if not (directory / name).exists():
        with open(directory / "compiled", "a") as log:
            log.write(f"{name}\\n")
        (directory / f"begun {name}").touch()
        while len(list(directory.glob("begun *"))) < TOGETHER:
            time.sleep(0.001)
        (directory / name).touch()
    inside.unlink()

make = one_at_a_time(make_launcher)

def fork(signature, meta=None):
    pid = os.fork()
    if not pid:
        make(SimpleNamespace(signature=dict(enumerate(signature))), SimpleNamespace(tensordesc_meta=meta))
        os._exit(0)
    return pid

def codes(children):
    return [os.waitpid(pid, 0)[1] for pid in children]
"""


def launchers(script: str, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHERS + script, str(directory)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (directory / "compiled").read_text().splitlines()


def test_equal_launchers_are_compiled_once_and_others_at_the_same_time(tmp_path: Path) -> None:
    script = """
TOGETHER = 3
assert not any(codes([fork(*one) for one in 3 * [["ab"], ["ac"], ["ab", [{"block": 4}]]]]))
"""
    assert sorted(launchers(script, tmp_path)) == ["abNone", "ab[{'block': 4}]", "acNone"]


def test_a_launcher_is_made_again_after_the_child_that_made_it_was_killed(tmp_path: Path) -> None:
    script = """
import signal
TOGETHER = 9
first = fork("ab")
while not (directory / "begun abNone").exists():
    time.sleep(0.001)
os.kill(first, signal.SIGKILL)
assert codes([first]) == [signal.SIGKILL]
(directory / "inside abNone").unlink()
TOGETHER = 0
assert codes([fork("ab")]) == [0]
"""
    assert launchers(script, tmp_path) == ["abNone", "abNone"]


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
