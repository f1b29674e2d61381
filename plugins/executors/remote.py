"""Common base of executors whose ranks run in other processes: every rank receives each Step (core/types/step.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import evolve

from engine.core.errors import ExecutorError, PluginError
from engine.core.executors import MAX_STEPS_IN_FLIGHT, Deployment, Executor, MessageDecoder
from engine.core.startup import Listener
from engine.core.types import CacheInfo, Step, StepResult
from engine.plugins.executors.pending import Pending


class RemoteExecutor(Executor):
    """Sends every step to all ranks and receives results from rank 0; subclasses implement the transport."""

    api = "2"

    def __init__(self, deployment: Deployment) -> None:
        """Raises PluginError if a plugin that ranks need was passed in from Python: only this process has it."""
        needed = {"attention", "quant", "models", "grammars"}
        if deployment.parts.drafter is not None:
            needed.add("speculators")
        for choice in deployment.parts.choices:
            if choice.extension_point in needed and choice.provenance == "object":
                raise PluginError(
                    f"{choice.extension_point} {choice.name!r} was passed in as an object, which other processes "
                    "cannot have; offer it as an installed plugin, or use --executor uniproc"
                )
        self._config = deployment.config
        self._device = deployment.device
        self._manifest = deployment.parts.manifest
        self._speculates = deployment.parts.speculates
        self._listener: Listener | None = None
        self._decoder: MessageDecoder[StepResult] = MessageDecoder(StepResult)
        self._in_flight: deque[Pending] = deque()

    @property
    def asynchronous(self) -> bool:
        return True

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    def _check_room(self, step: Step) -> None:
        """Raise ExecutorError if the maximum number of steps is in flight."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise ExecutorError(f"step {step.id} was submitted while {MAX_STEPS_IN_FLIGHT} others are in flight")


def common_cache(caches: Sequence[CacheInfo]) -> CacheInfo:
    """Return rank 0's cache info, with the number of blocks that every rank has."""
    return evolve(caches[0], num_blocks=min(cache.num_blocks for cache in caches))
