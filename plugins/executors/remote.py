"""What executors have in common whose model runs in other processes, one a rank, of which the first answers."""

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
    """Steps go to all ranks; subclasses know how they get there, and how results come back."""

    api = "2"

    def __init__(self, deployment: Deployment) -> None:
        """Raises PluginError if a part that ranks need was passed in from Python: it is in this process alone."""
        for choice in deployment.parts.choices:
            if choice.seam in ("attention", "quant", "models") and choice.provenance == "object":
                raise PluginError(
                    f"{choice.seam} {choice.name!r} was passed in as an object, which other processes cannot have; "
                    "offer it as an installed plugin, or use --executor uniproc"
                )
        self._config = deployment.config
        self._device = deployment.device
        self._manifest = deployment.parts.manifest
        self._listener: Listener | None = None
        self._decoder: MessageDecoder[StepResult] = MessageDecoder(StepResult)
        self._under_way: deque[Pending] = deque()

    @property
    def asynchronous(self) -> bool:
        """Always."""
        return True

    def watch(self, listener: Listener) -> None:
        """See Executor."""
        self._listener = listener

    def _check_room(self, step: Step) -> None:
        """Raise ExecutorError if as many steps are under way as may be."""
        if len(self._under_way) == MAX_STEPS_IN_FLIGHT:
            raise ExecutorError(f"step {step.id} was submitted while {MAX_STEPS_IN_FLIGHT} others are under way")


def cache_of_all(caches: Sequence[CacheInfo]) -> CacheInfo:
    """Rank 0's, with as many blocks as the rank with the fewest has."""
    return evolve(caches[0], num_blocks=min(cache.num_blocks for cache in caches))
