"""Runs the model in Ray actors, on one node or several: the worker loop and messages of `multiproc`, over calls."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve, field, frozen, validators

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed import Rendezvous
from engine.core.errors import ConfigError, ExecutorError
from engine.core.executors import (
    Answer,
    Deployment,
    Health,
    MessageDecoder,
    PendingResult,
    answer_values,
    encode,
    encode_call,
)
from engine.core.extras import install_command
from engine.core.startup import Progress
from engine.core.types import CacheInfo, Step
from engine.plugins.executors.control_messages import Assignment
from engine.plugins.executors.pending import Pending
from engine.plugins.executors.ray_actor import ActorLaunch, ActorLocation, RankActor
from engine.plugins.executors.remote import RemoteExecutor, common_cache

if TYPE_CHECKING:
    from engine.plugins.executors.ray_placement import Placement
    from engine.plugins.executors.ray_workers import RayWorkers


@frozen
class Options:
    """[executor.options]."""

    address: str | None = None
    """HOST:PORT of a Ray cluster, or Ray's words auto and local; unset: the cluster in RAY_ADDRESS, else the cluster
    that this machine is a node of, else a new one that ends with the engine."""
    placement_timeout: float = field(default=60.0, validator=validators.gt(0))
    """Seconds for Ray to reserve room for all ranks, and the same again to start them; raise it for autoscaling."""
    step_timeout: float = field(default=300.0, validator=validators.gt(0))
    """Seconds after which a step, or a control call, counts as hung: all workers are then killed."""


class RayExecutor(RemoteExecutor):
    """Starts one actor (`plugins/executors/ray_actor.py`) per device. All receive every step; rank 0 answers."""

    options_class = Options
    finds_devices = True
    actor: ClassVar[type[RankActor]] = RankActor
    """Class of the actors; every node must be able to import it."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        if find_spec("ray") is None:
            return f"Ray is not installed; install it with `{install_command('ray')}`"
        if ":" in config.executor.device:
            return f"Ray chooses the GPUs, and {config.executor.device} cannot be asked for; use --device cuda"
        return None

    def __init__(self, deployment: Deployment, options: Options) -> None:
        super().__init__(deployment)
        # Ray counts CPUs: a worker uses as many threads as its bundle reserves.
        executor = self._config.executor
        self._config = evolve(self._config, executor=evolve(executor, threads=max(1, executor.threads)))
        if options.address is not None and "://" in options.address:
            raise ConfigError(
                f"executor.options.address is {options.address!r}, but the engine must run on a node of the cluster "
                "itself, not behind a Ray Client; give HOST:PORT of the cluster's head"
            )
        self._options = options
        self._placement: Placement | None = None
        self._workers: RayWorkers | None = None

    def start(self) -> CacheInfo:
        """Reserve room, start the actors and wait until all are ready.

        Raises ExecutorError if there is no room, and the error of the first actor that failed, with its rank, node and
        phase.
        """
        from engine.plugins.executors.ray_placement import Placement
        from engine.plugins.executors.ray_workers import RayWorkers

        device, options = self._device, self._options
        ranks = self._config.executor.tensor_parallel
        bundle = {"CPU": self._config.executor.threads} | ({"GPU": 1} if device.type == "cuda" else {})
        if self._listener is not None:
            self._listener(Progress(phase="placement"))
        try:
            self._placement = Placement(options.address, bundle, ranks, options.placement_timeout)
            actors = [self._placement.start(self.actor, rank) for rank in range(ranks)]
            self._workers = RayWorkers(actors, options.step_timeout)
            locations = self._workers.locate(options.placement_timeout)
            launches = [self._launch(rank, locations, device) for rank in range(ranks)]
            caches = self._workers.start(launches, self._listener)
        except BaseException:
            self.shutdown()
            raise
        return common_cache(caches)

    def submit(self, step: Step) -> PendingResult:
        workers = self._running()
        self._check_room(step)
        if workers.failure is not None:
            raise ExecutorError(str(workers.failure))
        workers.submit(step.id, encode(step))
        pending = Pending(step.id, self._collect, workers.ready)
        self._in_flight.append(pending)
        return pending

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        workers = self._running()
        if workers.failure is not None:
            raise ExecutorError(str(workers.failure))
        data = encode_call(0, name, arguments)
        while self._in_flight:
            self._collect()
        decoder: MessageDecoder[Answer] = MessageDecoder(Answer)
        answers = [decoder.decode(answer) for answer in workers.call(name, data)]
        return answer_values(answers, workers.workers)

    def check(self) -> Health:
        """Return whether all actors are alive, by Ray's account, and none has reported an error."""
        if self._workers is None:
            return Health(ok=False, detail="the executor is shut down")
        self._workers.check()
        failure = self._workers.failure
        return Health(ok=failure is None, detail=str(failure or ""))

    def shutdown(self) -> None:
        """Kill the actors and free their room. Leaves the Ray cluster only if this executor joined it."""
        workers, self._workers = self._workers, None
        placement, self._placement = self._placement, None
        if placement is None or not placement.alive:
            return
        if workers is not None:
            workers.kill()
        placement.release()
        if workers is not None:
            workers.wait()
        placement.leave()

    def _launch(self, rank: int, locations: list[ActorLocation], device: DeviceInfo) -> ActorLaunch:
        """The message that starts the actor of a rank. Each actor sees the GPUs of all actors on its node."""
        here = locations[rank]
        gpus = [gpu for one in locations if one.node == here.node for gpu in one.gpus]
        index = gpus.index(here.gpus[0]) if device.type == "cuda" else 0
        return ActorLaunch(
            gpus=",".join(gpus),
            assignment=Assignment(
                config=self._config,
                executor=f"{type(self).__module__}:{type(self).__qualname__}",
                manifest=self._manifest,
                device=evolve(device, index=index).torch_name,
                first_device=device,
                rendezvous=Rendezvous(
                    rank=rank,
                    ranks=len(locations),
                    place=locations[0].meeting,
                    host=here.host,
                    peer_memory=len({one.node for one in locations}) == 1,
                ),
                speculates=self._speculates,
            ),
        )

    def _collect(self) -> None:
        """Wait for the result of the oldest in-flight step and resolve its Pending."""
        result = self._decoder.decode(self._running().collect())
        self._in_flight.popleft().complete(result)

    def _running(self) -> RayWorkers:
        if self._workers is None:
            raise ExecutorError("the executor is shut down; make a new engine")
        return self._workers
