"""Kernels recorded, compiled by another process for a GPU that is not here, and found on disk by this one.

In a process of its own, without the interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, logging, os, signal, sys, time
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class NoDevice:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(NoDevice())

from engine.core.compilation.client import SHARED
from engine.core.compilation.recording import CompilingElsewhere, record_launches
from engine.ops.activation.act_and_mul import _act_and_mul_kernel, act_and_mul
from engine.ops.gemm import persistent_matmul
from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.norm.rms_norm import _add_norm_kernel, add_rms_norm

compiled = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: compiled.append([src.name, cache_hit])
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("engine").addHandler(handler)

def launch():
    x, residual, weight = torch.ones(4, 64), torch.ones(4, 64), torch.ones(64)
    add_rms_norm(x, residual, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5)
    made = act_and_mul(x, "silu")
    assert torch.equal(residual, torch.ones(4, 64)), "a kernel ran"
    return made

def launch_gluon():
    x, weight = torch.zeros(128, 256, dtype=torch.int8), torch.zeros(256, 256, dtype=torch.int8)
    out, scale = torch.zeros(128, 256, dtype=torch.bfloat16), torch.ones(256)
    tile = W8A8Tile(rows=128, outputs=128, warps=8, stages=4, persistent=True)
    persistent_matmul.launch(out, ScaledOperands(x, scale, weight, scale, None), tile, Workspace(torch.device("cpu")))

def load(*kernels):
    return [one.result().name for kernel in kernels for one in kernel.device_caches[0][0].values()]

def report(**found):
    json.dump({"compiled": compiled, "warnings": warnings, **found}, sys.stdout)
"""
RECORD = """
run = JITFunction.run
with record_launches():
    assert not launch().any(), "there is a result"
    assert not torch.empty(1000).any()
    launch_gluon()
assert JITFunction.run is run, "launches only record after the block, too"
SHARED.wait()
report(loaded=load(_add_norm_kernel, _act_and_mul_kernel, persistent_matmul._matmul_kernel))
"""
KILLED = """
server = SHARED.begin()
with record_launches():
    launch()
    os.kill(server._process.pid, signal.SIGKILL)
report(loaded=load(_add_norm_kernel, _act_and_mul_kernel), running=server.running)
"""
UNDESCRIBED = """
def make():
    @triton.jit
    def local_kernel(x):
        triton.language.store(x, 1.0)
    return local_kernel

kernel = make()
with record_launches():
    kernel[(1,)](torch.ones(1))
report(loaded=load(kernel), server=SHARED._server is not None)
"""
LEFT = """
server = SHARED.begin()
with record_launches():
    launch()
    launch_gluon()
print(server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
SIZES = """
from engine.core.compilation.job import source_size
from engine.ops.attention.paged_decode import _decode_kernel
from engine.ops.common.launch import release, wait
own = sum(len(one.src) for one in (_add_norm_kernel, wait, release))
report(norm=source_size(_add_norm_kernel) - own, decode=source_size(_decode_kernel) - own)
"""
FAILED = """
server = SHARED.begin()
server.submit(b"no job").result()
with record_launches():
    launch()
report(loaded=load(_add_norm_kernel), running=server.running)
"""


def execute(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(directory)
    file = directory.parent / "script.py"
    file.write_text(SCRIPT + script)
    command = [sys.executable, str(file)]  # a file, since Triton reads the sources of kernels
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def run(script: str, directory: Path) -> Any:
    done = execute(script, directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "triton"


@pytest.fixture(scope="module")
def recorded(cache: Path) -> Any:
    return run(RECORD, cache)


NAMES = ["_add_norm_kernel", "_act_and_mul_kernel"]


def test_recorded_kernels_are_compiled_elsewhere_and_found_on_disk(recorded: Any) -> None:
    names = [*NAMES, "_matmul_kernel"]  # the last in Gluon
    assert recorded == {"compiled": [[name, True] for name in names], "warnings": [], "loaded": names}


def test_no_process_is_started_for_kernels_on_disk(recorded: Any, cache: Path) -> None:
    found = run("with record_launches(): launch()\nreport(server=SHARED._server is not None)", cache)
    assert found == {"compiled": [], "warnings": [], "server": False}


def test_kernels_of_a_server_that_dies_are_compiled_here_with_one_warning(tmp_path: Path) -> None:
    found = run(KILLED, tmp_path / "triton")
    assert found["loaded"] == [name for name, _ in found["compiled"]] == NAMES
    assert not found["running"]
    [warning] = found["warnings"]
    assert "ended with code -9" in warning


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    done = execute(LEFT, tmp_path / "triton")
    assert done.returncode == -signal.SIGKILL
    pid, until = int(done.stdout), time.monotonic() + 30
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid: int) -> bool:
    """Whether a process has not ended; in a container, perhaps no one reaps orphans that have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_kernel_that_cannot_be_imported_is_compiled_here(tmp_path: Path) -> None:
    found = run(UNDESCRIBED, tmp_path / "triton")
    assert found == {"compiled": [["local_kernel", False]], "warnings": [], "loaded": ["local_kernel"], "server": False}


def test_a_job_that_fails_ends_neither_the_server_nor_other_jobs(tmp_path: Path) -> None:
    found = run(FAILED, tmp_path / "triton")
    assert found["compiled"] == [["_add_norm_kernel", True]]
    assert found["running"]
    assert found["warnings"] == []


def test_the_size_of_a_kernel_counts_the_functions_that_it_calls(tmp_path: Path) -> None:
    found = run(SIZES, tmp_path / "triton")
    assert found["norm"] >= 0
    assert found["decode"] > 10_000
