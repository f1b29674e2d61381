"""A plugin whose attention backend fails on demand.

Options: at (start, prefill or decode; the last two after the rehearsal, which ends with its only decode step);
do (kill, memory, bug, wait: a moment, or part: abort the rank groups).
With the environment variable FAULTY_HOLDS=exit it holds up the exit of each process that imports it; with
FAULTY_HOLDS=hook it does not return from engine_stopped.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import time
from typing import Any

from attrs import frozen

from engine.core.hooks import Register, hookimpl


def hold_up() -> None:
    time.sleep(1000)


if os.environ.get("FAULTY_HOLDS") == "exit":
    atexit.register(hold_up)


@hookimpl
def engine_stopped(engine: Any) -> None:
    if os.environ.get("FAULTY_HOLDS") == "hook":
        hold_up()


@hookimpl
def register_attention(register: Register) -> None:
    register("faulty", load, api="1", summary="fails on demand", preference=99)


@frozen
class Options:
    at: str = ""
    do: str = ""


def load() -> type:
    import torch

    from engine.plugins.attention.torch import TorchAttention

    class FaultyAttention(TorchAttention):
        options_class = Options

        def __init__(self, spec: Any, pool: Any, options: Options) -> None:
            super().__init__(spec, pool, None)
            self._options = options
            self._groups = groups() if options.do == "part" else []
            self._rehearsed = False
            self._fault("start")

        def plan(self, batch: Any, graph: Any = None) -> Any:
            if self._rehearsed:
                self._fault("decode" if batch.num_decodes else "prefill")
            self._rehearsed = self._rehearsed or batch.num_decodes > 0
            return super().plan(batch, graph)

        def _fault(self, at: str) -> None:
            if at != self._options.at:
                return
            if self._options.do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._options.do == "wait":
                time.sleep(0.02)
                return
            if self._options.do == "bug":
                raise KeyError("tide")
            if self._options.do == "part":
                for group in self._groups:
                    group._backend.abort()
                return
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    return FaultyAttention


def groups() -> list[Any]:
    """Rank groups of this process, none on the first rank. Call at the start: later gc.freeze
    has hidden them from the collector."""
    from engine.core.distributed.rank_group import TorchGroup

    return [one for one in gc.get_objects() if isinstance(one, TorchGroup) and one.rank > 0]
