"""The limit of a process's exit, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time
from engine.server.shared import exit_limit

exit_limit.WARN_SECONDS = {warn}

def hold_up():
    time.sleep(100)

def wait():
    threading.Event().wait(100)

def catch():
    try:
        hold_up()
    finally:
        print("never printed")

{before}
print("printed before the exit")
exit_limit.limit_exit(7, {seconds})
{after}
sys.exit(3)
"""


def run(tmp_path: Path, before: str = "", after: str = "", warn: float = 0.05, seconds: float = 0.1) -> tuple[int, str]:
    """The exit code, and what is on standard error; standard output is checked here."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(before=before, after=after, warn=warn, seconds=seconds))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "printed before the exit\n"
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("atexit.register(hold_up)", "", r"held up by hold_up() ("),
        ("threading.Thread(target=hold_up, name='late').start()", "", "held up by the thread 'late' in hold_up() ("),
        ("", "catch()", "held up by hold_up() ("),
        ("atexit.register(wait)", "", "held up by wait() ("),
    ],
    ids=["exit handler", "thread", "before the exit", "within the standard library"],
)
def test_what_holds_up_the_exit_is_named_and_the_process_ended(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    code, errors = run(tmp_path, before, after)
    assert code == 7
    assert said in errors
    line = 11 if "wait()" in said else 8
    assert f"({tmp_path / 'script.py'}, line {line}); the process is ended 0.1 s after its exit began" in errors


def test_a_process_that_exits_by_itself_is_left_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "atexit.register(time.sleep, 0.01)", warn=50, seconds=60) == (3, "")


def test_daemon_threads_hold_up_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "threading.Thread(target=hold_up, daemon=True).start()", warn=50, seconds=60) == (3, "")


def test_a_process_whose_output_can_no_longer_be_written_is_ended_too(tmp_path: Path) -> None:
    before = """
class Broken:
    def flush(self):
        sys.__stdout__.flush()
        raise BrokenPipeError

atexit.register(hold_up)
atexit.register(setattr, sys, "stdout", Broken())  # handlers run last in, first out
"""
    code, errors = run(tmp_path, before)
    assert code == 7
    assert "held up by hold_up() (" in errors
    assert "BrokenPipeError" not in errors


def test_a_limit_shorter_than_the_time_of_the_warning_is_kept(tmp_path: Path) -> None:
    code, errors = run(tmp_path, "atexit.register(hold_up)", warn=50, seconds=0.1)
    assert code == 7
    assert "held up by hold_up() (" in errors


def test_a_process_whose_output_no_one_reads_is_ended_too(tmp_path: Path) -> None:
    before = """
import os
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 65536)
except BlockingIOError:
    os.set_blocking(2, True)  # the pipe is full: each further write blocks
exit_limit.WRITE_SECONDS = 0.1
atexit.register(hold_up)
"""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(before=before, after="", warn=0.05, seconds=0.1))
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=30) == 7
        finally:
            process.kill()
