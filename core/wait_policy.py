"""How idle CPU threads of tensor operations wait. OpenMP reads that from the environment, once, as torch is loaded."""

from __future__ import annotations

import os
import sys

from engine.core.config.tree import AUTO, ExecutorConfig
from engine.core.errors import ConfigError

VARIABLE = "OMP_WAIT_POLICY"
SAME_MEANING = (VARIABLE, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which users set how threads wait: OpenMP's, and those of GNU's and LLVM's implementations."""


def set_wait_policy(config: ExecutorConfig) -> None:
    """Apply executor.thread_wait to this process and the processes that it starts; to be called before torch is loaded.

    Raises ConfigError when torch is loaded already and the setting asks for something else than it was loaded with.
    """
    wanted = config.thread_wait
    if wanted == AUTO:
        if "torch" not in sys.modules and not any(name in os.environ for name in SAME_MEANING):
            os.environ[VARIABLE] = "PASSIVE"
        return
    if "torch" in sys.modules and os.environ.get(VARIABLE, "").lower() != wanted:
        raise ConfigError(
            f"executor.thread_wait={wanted} comes too late, because torch is imported already; make the engine before"
            f" importing torch, or set {VARIABLE}={wanted.upper()} in the environment"
        )
    os.environ[VARIABLE] = wanted.upper()
