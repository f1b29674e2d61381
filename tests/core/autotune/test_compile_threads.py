"""Kernels compiled without a launch, for a GPU that is not here: in a process of their own, without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class NoDevice:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(NoDevice())

from engine.core.autotune.compile_threads import compiling_only
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.norm.rms_norm import add_rms_norm

compiled = []
triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
run = JITFunction.run
x, residual, weight = torch.ones(4, 64), torch.ones(4, 64), torch.ones(64)
with compiling_only():
    add_rms_norm(x, residual, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5)
    assert not act_and_mul(x, "silu").any(), "there is a result"
    assert not torch.empty(1000).any()
    assert not torch.empty_like(x).any()
assert JITFunction.run is run, "launches compile only after the block, too"
assert sorted(compiled) == ["_act_and_mul_kernel", "_add_norm_kernel"], compiled
assert torch.equal(residual, torch.ones(4, 64)), "a kernel ran"
try:
    with compiling_only():
        raise KeyError("stopped")
except KeyError:
    pass
assert JITFunction.run is run, "launches compile only after an error"
"""


def test_launches_compile_their_kernels_once_and_run_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
