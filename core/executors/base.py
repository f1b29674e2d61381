"""Contract of plugins/executors: where the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.plugin_host.selection import Parts
    from engine.core.startup import Listener
    from engine.core.types import CacheInfo, Step, StepResult

API = "1"
MOST_STEPS = 2
"""Steps under way at once."""


class PendingResult(Protocol):
    """A step under way."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> StepResult:
        """Wait for the step; raises ExecutorError if it failed."""


@frozen(kw_only=True)
class Health:
    """Whether an executor can run steps."""

    ok: bool
    detail: str = ""
    """What is wrong, in a sentence."""
    beat: float | None = None
    """When the slowest of its own loops went round last, time.monotonic(); None: it has none, or all are at work."""
    rank: int = 0
    """Whose loop that is."""


class Executor(ABC):
    """Runs steps in the order submitted. Tensors never leave it: steps go in, tokens come out."""

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None
    finds_devices: ClassVar[bool] = False
    """Whether it looks for devices itself, as in a cluster: several engines then need not be told apart which of this
    machine's each has."""

    @classmethod
    @abstractmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """Why it cannot run this configuration, and what would work; None if it can.

        device: the first of its devices, in whatever process it is asked. One that runs a single device refuses more
        (config.executor.tensor_parallel): nobody else does.
        """

    @abstractmethod
    def __init__(self, config: EngineConfig, parts: Parts, options: Any) -> None:
        """Keep the arguments; no work yet."""

    @property
    @abstractmethod
    def asynchronous(self) -> bool:
        """Whether `submit` returns before the step is computed, so that planning the next one meanwhile pays."""

    def watch(self, listener: Listener) -> None:  # noqa: B027
        """Tell `listener` about the phases of `start`, which comes next. An executor without phases tells nothing."""

    @abstractmethod
    def start(self) -> CacheInfo:
        """Load the model and make the KV cache. Raises CheckpointError or CapacityError.

        If it raises, it has freed everything itself: `shutdown` is not called.
        """

    @abstractmethod
    def submit(self, step: Step) -> PendingResult:
        """Begin a step; at most MOST_STEPS are under way at once. Raises ExecutorError if it cannot be begun."""

    @abstractmethod
    def check(self) -> Health:
        """Cheap; called at any time from the engine's thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything; a second call does nothing."""
