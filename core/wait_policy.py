"""Sets how idle CPU threads of tensor operations wait, by variables that OpenMP reads once, when torch is loaded."""

from __future__ import annotations

import os
import sys

from engine.core.config.tree import AUTO, ExecutorConfig
from engine.core.errors import ConfigError

VARIABLE = "OMP_WAIT_POLICY"
SPIN_COUNT = "GOMP_SPINCOUNT"
SAME_MEANING = (VARIABLE, SPIN_COUNT, "KMP_BLOCKTIME")
"""Variables with which users set how threads wait: OpenMP's, and those of GNU's and LLVM's implementations."""
AUTO_SPIN_COUNT = 30_000
"""Iterations (some 0.1 ms) that a thread of GNU's OpenMP spins before it sleeps: longer than the time between two
operations of a step, so that a step on idle cores wakes no thread, and short next to a time slice of a busy one."""


def set_wait_policy(config: ExecutorConfig) -> None:
    """Apply executor.thread_wait to this process and the processes that it starts; to be called before torch is loaded.

    Raises ConfigError when torch is loaded already and the setting asks for something else than it was loaded with.
    """
    wanted = config.thread_wait
    if wanted == AUTO:
        if "torch" not in sys.modules and not any(name in os.environ for name in SAME_MEANING):
            os.environ[VARIABLE] = "PASSIVE"
            os.environ[SPIN_COUNT] = str(AUTO_SPIN_COUNT)
        return
    if "torch" in sys.modules and os.environ.get(VARIABLE, "").lower() != wanted:
        raise ConfigError(
            f"executor.thread_wait={wanted} comes too late, because torch is imported already; make the engine before"
            f" importing torch, or set {VARIABLE}={wanted.upper()} in the environment"
        )
    os.environ[VARIABLE] = wanted.upper()
    os.environ.pop(SPIN_COUNT, None)  # which would say otherwise
