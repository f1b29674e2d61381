"""What executors have in common whose model runs in other processes, one a rank, of which the first answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import evolve

from engine.core.config import EngineConfig
from engine.core.errors import ExecutorError, PluginError
from engine.core.executors import MOST_STEPS, Decoder, Executor
from engine.core.plugin_host import Parts
from engine.core.startup import Listener
from engine.core.types import CacheInfo, Step, StepResult
from engine.plugins.executors.pending import Pending


class RemoteExecutor(Executor):
    """Steps go to all ranks; subclasses know how they get there, and how results come back."""

    api = "1"

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        """Raises PluginError if a part that ranks need was passed in from Python: it is in this process alone."""
        for choice in parts.choices:
            if choice.extension_point in ("attention", "quant", "models") and choice.provenance == "object":
                raise PluginError(
                    f"{choice.extension_point} {choice.name!r} was passed in as an object, which other processes "
                    "cannot have; offer it as an installed plugin, or use --executor uniproc"
                )
        self._config = config
        self._manifest = parts.manifest
        self._listener: Listener | None = None
        self._decoder: Decoder[StepResult] = Decoder(StepResult)
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
        if len(self._under_way) == MOST_STEPS:
            raise ExecutorError(f"step {step.id} was submitted while {MOST_STEPS} others are under way")


def cache_of_all(caches: Sequence[CacheInfo]) -> CacheInfo:
    """Rank 0's, with as many blocks as the rank with the fewest has."""
    return evolve(caches[0], num_blocks=min(cache.num_blocks for cache in caches))
