"""Ranks as actors that Ray places, on one node or on several: the same worker loop and the same messages, by calls."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen, validators

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo, find_device
from engine.core.distributed import Rendezvous
from engine.core.errors import ConfigError, ExecutorError
from engine.core.executors import Health, PendingResult, encode
from engine.core.extras import install_command
from engine.core.plugin_host import Parts
from engine.core.startup import Progress
from engine.core.types import CacheInfo, Step
from engine.plugins.executors.messages import Assignment
from engine.plugins.executors.pending import Pending
from engine.plugins.executors.ray_actor import Begin, RankActor, Whereabouts
from engine.plugins.executors.remote import RemoteExecutor, cache_of_all

if TYPE_CHECKING:
    from engine.plugins.executors.ray_placement import Placement
    from engine.plugins.executors.ray_ranks import Ranks


@frozen
class Options:
    """[executor.options]."""

    address: str | None = None
    """HOST:PORT of a Ray cluster, or Ray's words auto and local; unset: what RAY_ADDRESS names, else the cluster that
    this machine is a node of, else one that is started here and ends with the engine."""
    placement_timeout: float = field(default=60.0, validator=validators.gt(0))
    """Seconds that Ray gets to find room for all ranks, and as long again to start them; more where it starts nodes."""
    step_timeout: float = field(default=300.0, validator=validators.gt(0))
    """Seconds after which a step counts as hung: the workers are then ended."""


class RayExecutor(RemoteExecutor):
    """Starts actors (`plugins/executors/ray_actor.py`), one a device, which all receive every step; rank 0 answers."""

    options_class = Options
    finds_devices = True
    actor: ClassVar[type[RankActor]] = RankActor
    """What Ray is given to start; the nodes must be able to import it."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """The absence of Ray, and a GPU that was asked for by number."""
        if find_spec("ray") is None:
            return f"Ray is not installed; install it with `{install_command('ray')}`"
        if ":" in config.executor.device:
            return f"Ray chooses the GPUs, and {config.executor.device} cannot be asked for; use --device cuda"
        return None

    def __init__(self, config: EngineConfig, parts: Parts, options: Options) -> None:
        # Ray counts CPUs, and a worker uses as many threads as it was promised.
        threads = max(1, config.executor.threads)
        super().__init__(evolve(config, executor=evolve(config.executor, threads=threads)), parts)
        if options.address is not None and "://" in options.address:
            raise ConfigError(
                f"executor.options.address is {options.address!r}, but the engine must run on a node of the cluster "
                "itself, not behind a Ray Client; give HOST:PORT of the cluster's head"
            )
        self._options = options
        self._placement: Placement | None = None
        self._ranks: Ranks | None = None

    def start(self) -> CacheInfo:
        """Find room, start the actors, and wait until each is ready.

        Raises ExecutorError if there is no room, and what stopped the first actor that failed, with its rank, node and
        phase.
        """
        from engine.plugins.executors.ray_placement import Placement
        from engine.plugins.executors.ray_ranks import Ranks

        device, options = find_device(self._config.executor.device), self._options
        number = self._config.executor.tensor_parallel
        bundle = {"CPU": self._config.executor.threads} | ({"GPU": 1} if device.type == "cuda" else {})
        if self._listener is not None:
            self._listener(Progress(phase="placement"))
        try:
            self._placement = Placement(options.address, bundle, number, options.placement_timeout)
            actors = [self._placement.start(self.actor, rank) for rank in range(number)]
            self._ranks = Ranks(actors, options.step_timeout)
            places = self._ranks.place(options.placement_timeout)
            orders = [self._order(rank, places, device) for rank in range(number)]
            caches = self._ranks.start(orders, self._listener)
        except BaseException:
            self.shutdown()
            raise
        return cache_of_all(caches)

    def submit(self, step: Step) -> PendingResult:
        """See Executor."""
        ranks = self._running()
        self._check_room(step)
        if ranks.failure is not None:
            raise ExecutorError(str(ranks.failure))
        ranks.submit(step.id, encode(step))
        pending = Pending(step.id, self._collect, ranks.ready)
        self._under_way.append(pending)
        return pending

    def check(self) -> Health:
        """Whether Ray says that all actors live, and none has said that it failed."""
        if self._ranks is None:
            return Health(ok=False, detail="the executor is shut down")
        self._ranks.check()
        failure = self._ranks.failure
        return Health(ok=failure is None, detail=str(failure or ""))

    def shutdown(self) -> None:
        """See Executor. Leaves Ray only if this executor joined it."""
        ranks, self._ranks = self._ranks, None
        placement, self._placement = self._placement, None
        if placement is None or not placement.alive:
            return
        if ranks is not None:
            ranks.kill()
        placement.release()
        if ranks is not None:
            ranks.wait()
        placement.leave()

    def _order(self, rank: int, places: list[Whereabouts], device: DeviceInfo) -> Begin:
        """What the actor of a rank is to do. On a node with several, each sees the GPUs of all."""
        where = places[rank]
        gpus = [gpu for place in places if place.node == where.node for gpu in place.gpus]
        index = gpus.index(where.gpus[0]) if device.type == "cuda" else 0
        return Begin(
            gpus=",".join(gpus),
            assignment=Assignment(
                config=self._config,
                executor=f"{type(self).__module__}:{type(self).__qualname__}",
                manifest=self._manifest,
                device=evolve(device, index=index).torch_name,
                first=device,
                rendezvous=Rendezvous(
                    rank=rank,
                    ranks=len(places),
                    place=places[0].meeting,
                    host=where.host,
                    peer_memory=len({place.node for place in places}) == 1,
                ),
            ),
        )

    def _collect(self) -> None:
        """Wait for the result of the oldest step, and give it to who holds that."""
        result = self._decoder.decode(self._running().collect())
        self._under_way.popleft().complete(result)

    def _running(self) -> Ranks:
        if self._ranks is None:
            raise ExecutorError("the executor is shut down; make a new engine")
        return self._ranks
