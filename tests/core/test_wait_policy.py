from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from engine.core.wait_policy import AUTO_SPIN_COUNT, SAME_MEANING

WAIT_POLICY = """
import sys
from engine.core.config.tree import ExecutorConfig
from engine.core.wait_policy import set_wait_policy
if {torch_first}:
    import torch
set_wait_policy(ExecutorConfig(thread_wait={wanted!r}))
import torch
"""


def policy_of(
    wanted: str,
    environment: Mapping[str, str] = {},
    *,
    torch_first: bool = False,
    variable: str = "OMP_WAIT_POLICY",
    display: str = "true",
) -> str:
    """What OpenMP says of how threads wait, in a process of its own; the error when the setting is refused."""
    code = WAIT_POLICY.format(wanted=wanted, torch_first=torch_first)
    inherited = {name: value for name, value in os.environ.items() if name not in SAME_MEANING}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=inherited | {"OMP_DISPLAY_ENV": display} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = [line for line in done.stderr.splitlines() if variable in line and "=" in line]
    return done.stderr if done.returncode else shown[0].partition("=")[2].strip().strip("'").lower()


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


def test_a_policy_is_refused_after_torch() -> None:
    assert "comes too late, because torch is imported already" in policy_of("passive", torch_first=True)
    assert "comes too late" not in policy_of("passive", {"OMP_WAIT_POLICY": "PASSIVE"}, torch_first=True)


def test_the_default_takes_torch_as_it_is() -> None:
    assert "comes too late" not in policy_of("auto", torch_first=True)
