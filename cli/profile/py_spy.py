"""Runs py-spy, which reads the Python stacks of other processes (extra: profile)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import frozen

from engine.cli.processes import Process
from engine.cli.profile.target import PTRACE_ADVICE
from engine.core.errors import ConfigError, ExecutorError
from engine.core.extras import install_command

START_SECONDS = 60
"""Time that py-spy may take besides that of the recording."""


@frozen(kw_only=True)
class Sampling:
    """How stacks are sampled."""

    seconds: int
    rate: int
    """Samples per second and thread."""
    idle: bool = False
    """Whether threads that sleep are sampled too."""
    native: bool = False
    """Whether frames of C and C++ are in the stacks; pauses the process for each sample."""
    pause: bool = False
    """Whether the process is stopped while each sample is taken."""

    def options(self) -> list[str]:
        """The options of `py-spy record`."""
        options = ["--duration", str(self.seconds), "--rate", str(self.rate), "--format", "raw", "--threads"]
        options += ["--idle"] * self.idle + ["--native"] * self.native
        return [*options, "--full-filenames", *["--nonblocking"] * (not (self.pause or self.native))]


def find_py_spy() -> str:
    """Path of py-spy's executable. Raises ConfigError."""
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise ConfigError(f"py-spy is not installed; install it with `{install_command('profile')}`")
    return found


def record(processes: Iterable[Process], sampling: Sampling, directory: Path) -> dict[str, str]:
    """Sample all processes at the same time; by role, the stacks as py-spy's raw format.

    directory: for temporary files. Raises ConfigError and ExecutorError. A process that ends meanwhile is left out.
    """
    program = find_py_spy()
    running = []
    try:
        for process in processes:
            file = directory / f"{process.pid}.txt"
            command = [program, "record", "--pid", str(process.pid), *sampling.options(), "--output", str(file)]
            spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            running.append((process, file, spy))
        stacks = {}
        for process, file, spy in running:
            _, errors = spy.communicate(timeout=sampling.seconds + START_SECONDS)
            if spy.returncode and Path(f"/proc/{process.pid}").exists():
                raise failure(process, errors)
            if file.exists():
                stacks[process.role] = file.read_text(encoding="utf-8")
    except subprocess.TimeoutExpired:
        raise ExecutorError(f"py-spy did not end within {START_SECONDS} s of the recording") from None
    finally:
        for _, _, spy in running:
            spy.kill()
            spy.communicate()
    return stacks


def dump(process: Process, *, native: bool = False) -> str:
    """The stacks of all threads of a process now, as text. Raises ConfigError and ExecutorError."""
    command = [find_py_spy(), "dump", "--pid", str(process.pid), "--native" if native else "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ExecutorError(f"py-spy did not end within {START_SECONDS} s on {_name(process)}") from None
    if done.returncode:
        raise failure(process, done.stderr)
    return done.stdout


def failure(process: Process, errors: str) -> ConfigError | ExecutorError:
    """The error for what py-spy wrote about a process."""
    name = _name(process)
    if "permission denied" in errors.lower() or "operation not permitted" in errors.lower():
        return ConfigError(f"this user may not trace {name}: {PTRACE_ADVICE}")
    return ExecutorError(f"py-spy failed on {name}: {_sentence(errors.splitlines())}")


def _name(process: Process) -> str:
    return f"{process.role} (process {process.pid})"


def _sentence(lines: Sequence[str]) -> str:
    """What py-spy says, without its own backtrace."""
    found = [line.removeprefix("Error: ").strip() for line in lines if line.strip()]
    found = [line for line in found if not line.startswith("py-spy>")]
    return found[0] if found else "it says nothing"
