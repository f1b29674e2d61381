from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.core.wait_policy import AUTO_SPIN_COUNT, SAME_MEANING

WAIT_POLICY = """
from engine.core.config.tree import ExecutorConfig
from engine.core.wait_policy import set_wait_policy
set_wait_policy(ExecutorConfig(thread_wait={wanted!r}))
{load}
"""
AFTER_TORCH = """
import os, sys
from engine.core.config.tree import ExecutorConfig
from engine.core.errors import ConfigError
from engine.core.wait_policy import set_wait_policy
import torch
for policy, wanted in zip(sys.argv[1::2], sys.argv[2::2]):
    os.environ["OMP_WAIT_POLICY"] = policy
    try:
        set_wait_policy(ExecutorConfig(thread_wait=wanted))
        print("taken")
    except ConfigError as error:
        print(error)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, in whose environment nothing else says how threads wait."""
    inherited = {name: value for name, value in os.environ.items() if name not in SAME_MEANING}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def load_openmp() -> str:
    """Code that loads torch's OpenMP: the library itself where torch has one, which takes a tenth of the time."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    found = [str(file) for file in (Path(torch.origin).parent / "lib").glob("lib?omp*")]
    return f"import ctypes; ctypes.CDLL({found[0]!r})" if found else "import torch"


def policy_of(
    wanted: str,
    environment: Mapping[str, str],
    *,
    variable: str = "OMP_WAIT_POLICY",
    display: str = "true",
    load: str | None = None,
) -> str:
    """What OpenMP says of how threads wait."""
    code = WAIT_POLICY.format(wanted=wanted, load=load or load_openmp())
    lines = run(code, OMP_DISPLAY_ENV=display, **environment).stderr.splitlines()
    shown = [line for line in lines if variable in line and "=" in line]
    return shown[0].partition("=")[2].strip().strip("'").lower()


@pytest.mark.parametrize(
    ("wanted", "environment", "policy"),
    [
        ("auto", {}, "passive"),
        ("passive", {"OMP_WAIT_POLICY": "active"}, "passive"),
        ("active", {}, "active"),
        ("auto", {"OMP_WAIT_POLICY": "active"}, "active"),
    ],
)
def test_threads_wait_as_set(wanted: str, environment: dict[str, str], policy: str) -> None:
    assert policy_of(wanted, environment) == policy


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch for Linux has GNU's OpenMP")
@pytest.mark.parametrize(
    ("wanted", "environment", "count"),
    [
        ("auto", {}, AUTO_SPIN_COUNT),
        ("auto", {"GOMP_SPINCOUNT": "7"}, 7),
        ("passive", {"GOMP_SPINCOUNT": "7"}, 0),
    ],
)
def test_threads_spin_before_they_sleep_by_default(wanted: str, environment: dict[str, str], count: int) -> None:
    assert policy_of(wanted, environment, variable="GOMP_SPINCOUNT", display="verbose") == str(count)


def test_torch_loads_openmp_after_the_policy_is_set() -> None:
    assert policy_of("auto", {}, load="import torch") == "passive"


def test_a_policy_is_refused_after_torch_unless_torch_was_loaded_with_it() -> None:
    cases = {("", "passive"): False, ("PASSIVE", "passive"): True, ("PASSIVE", "active"): False, ("", "auto"): True}
    answers = run(AFTER_TORCH, *(word for case in cases for word in case)).stdout.splitlines()
    assert [answer == "taken" for answer in answers] == list(cases.values())
    assert all("comes too late, because torch is imported already" in one for one in answers if one != "taken")
