"""Contract of plugins/executors: where the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

from engine.core.errors import ControlError

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.executors.deployment import Deployment
    from engine.core.startup import Listener
    from engine.core.types import CacheInfo, Step, StepResult

API = "2"
"""Version of this contract. Version "1", whose constructor takes (config, parts, options), is still accepted."""
MAX_STEPS_IN_FLIGHT = 2
"""Maximum number of steps submitted and not yet answered."""


class PendingResult(Protocol):
    """An in-flight step."""

    def done(self) -> bool:
        """Whether `result` returns without waiting."""

    def result(self) -> StepResult:
        """Wait for the step; raises ExecutorError if the step failed."""


@frozen(kw_only=True)
class Health:
    """Whether an executor can run steps."""

    ok: bool
    detail: str = ""
    """What is wrong, in a sentence."""
    heartbeat: float | None = None
    """Time of the oldest heartbeat among the idle workers' loops, time.monotonic(); None: no worker is idle, or the
    executor has no loops of its own."""
    rank: int = 0
    """Rank of the worker with that heartbeat."""


class Executor(ABC):
    """Runs steps in the order submitted. Steps go in, tokens come out; tensors stay inside."""

    api: ClassVar[str]
    """Version of the contract that the class was written for."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([executor.options]); None: no settings."""
    finds_devices: ClassVar[bool] = False
    """Whether the executor finds its own devices, for example in a cluster. If so, replicas are not assigned separate
    GPUs of this machine."""

    @classmethod
    @abstractmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """Return a sentence that says why it cannot run `config` and what would work; None if it can.

        device: the first of the executor's devices, in every process that asks. An executor of one device must refuse
        more (config.executor.tensor_parallel): nothing else checks this.
        """

    @abstractmethod
    def __init__(self, deployment: Deployment, options: Any) -> None:
        """Keep the arguments; all work belongs into `start`.

        options: an instance of `options_class`, None without one.
        """

    @property
    @abstractmethod
    def asynchronous(self) -> bool:
        """Whether `submit` returns before the step is computed, so that planning the next step can overlap."""

    def watch(self, listener: Listener) -> None:  # noqa: B027
        """Report the phases of the coming `start` to `listener`. An executor without phases reports nothing."""

    @abstractmethod
    def start(self) -> CacheInfo:
        """Load the model and allocate the KV cache. Raises CheckpointError or CapacityError.

        On an error it frees everything before raising: `shutdown` is not called.
        """

    @abstractmethod
    def submit(self, step: Step) -> PendingResult:
        """Begin a step; at most MAX_STEPS_IN_FLIGHT are in flight. Raises ExecutorError if it cannot begin."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Run a control operation on every rank, by `Runner.call`; return the answers, by rank.

        Ordered with the steps: each rank has run all steps submitted before, also those whose results no one has
        fetched, and begins those submitted after once it has answered. Waits for all answers. Arguments and answers are
        plain data of at most MAX_CALL_BYTES each.

        Raises ControlError if the executor has no control calls, and if the operation is unknown, refused or fails on a
        rank, which the error names; steps can run afterwards. Raises ExecutorError if a device or a worker has failed.
        """
        raise ControlError(
            f"{type(self).__name__} cannot run {name}: this executor has no control calls; use one that implements "
            "Executor.call, as the built-in ones do"
        )

    @abstractmethod
    def check(self) -> Health:
        """Return the health now. Cheap; called at any time from the engine's thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything; a second call does nothing."""
