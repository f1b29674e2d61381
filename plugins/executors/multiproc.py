"""The runner in a process of its own: steps go there, and what they sampled comes back, over rings in shared memory."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import ClassVar

from attrs import evolve, field, frozen, validators

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed import Rendezvous
from engine.core.errors import ExecutorError
from engine.core.executors import Deployment, Health, PendingResult, encode
from engine.core.shm import Ring, RingClosedError
from engine.core.types import CacheInfo, Step
from engine.plugins.executors.messages import Launch
from engine.plugins.executors.pending import Pending
from engine.plugins.executors.progress import Beats
from engine.plugins.executors.remote import RemoteExecutor, cache_of_all
from engine.plugins.executors.worker_process import WorkerProcess
from engine.plugins.executors.workers import Workers


@frozen
class Options:
    """[executor.options]."""

    step_timeout: float = field(default=300.0, validator=validators.gt(0))
    """Seconds after which a step counts as hung: the workers are then ended."""


class MultiprocExecutor(RemoteExecutor):
    """Starts workers (`plugins/executors/worker.py`), one a device, which all receive every step; rank 0 answers."""

    options_class = Options
    worker: ClassVar[str] = "engine.plugins.executors.worker"
    """The module that a worker runs."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """More than one device, and systems without what it watches processes with."""
        if config.executor.tensor_parallel > 1:
            return f"it runs one device, not {config.executor.tensor_parallel}; use --executor tp, or --tp 1"
        return refuses_system()

    def __init__(self, deployment: Deployment, options: Options) -> None:
        super().__init__(deployment)
        self._options = options
        self._workers: Workers | None = None

    def start(self) -> CacheInfo:
        """Start the workers, and wait until each is ready.

        Raises what stopped the first of them that failed, with its rank and the phase it was in.
        """
        ranks = self._config.executor.tensor_parallel
        self._steps, self._results = Ring.create(readers=ranks), Ring.create(readers=1)
        self._writer, self._reader = self._steps.writer(), self._results.reader(0)
        self._memory = (Beats.make(ranks), os.memfd_create("engine-store"))
        self._beats = Beats(self._memory[0], ranks).rows()
        makers = [partial(self._make_worker, rank) for rank in range(ranks)]
        self._workers = Workers(makers, self._interrupt, self._options.step_timeout)
        try:
            caches = self._workers.start(self._listener)
        except BaseException:
            self.shutdown()
            raise
        return cache_of_all(caches)

    def submit(self, step: Step) -> PendingResult:
        """See Executor."""
        workers = self._running()
        self._check_room(step)
        try:
            self._writer.send(encode(step))
        except RingClosedError as closed:
            raise self._failure(closed) from None
        pending = Pending(step.id, self._collect, self._reader.ready)
        self._under_way.append(pending)
        if len(self._under_way) == 1:
            workers.oldest = (step.id, time.monotonic())
        return pending

    def check(self) -> Health:
        """Whether all workers live, and the beat of the slowest that has nothing to do."""
        if self._workers is None:
            return Health(ok=False, detail="the executor is shut down")
        if self._workers.failure is not None:
            return Health(ok=False, detail=str(self._workers.failure))
        idle = [(beat.at, rank) for rank, beat in enumerate(self._beats) if beat.begun == beat.finished]
        if not idle:
            return Health(ok=True)
        at, rank = min(idle)
        return Health(ok=True, heartbeat=at, rank=rank)

    def shutdown(self) -> None:
        """See Executor."""
        workers, self._workers = self._workers, None
        if workers is not None:
            self._writer.close()
            workers.stop()
            self._steps.close()
            self._results.close()
            del self._steps, self._results, self._writer, self._reader  # and with them their memory
            for descriptor in self._memory:
                os.close(descriptor)

    def _make_worker(self, rank: int) -> WorkerProcess:
        """Start the worker of a rank; its device is so many after the first."""
        beats, store = self._memory
        ranks = self._config.executor.tensor_parallel
        results = self._results.handle if rank == 0 else None
        config, device = self._config, self._device
        if device.type == "cpu" and ranks > 1 and not config.executor.threads:
            share = max(1, len(os.sched_getaffinity(0)) // ranks)
            config = evolve(config, executor=evolve(config.executor, threads=share))
        launch = Launch(
            config=config,
            executor=f"{type(self).__module__}:{type(self).__qualname__}",
            manifest=self._manifest,
            device=evolve(device, index=device.index + rank).torch_name,
            first=device,
            rendezvous=Rendezvous(rank=rank, ranks=ranks, place=f"/proc/self/fd/{store}"),
            steps=self._steps.handle,
            results=results,
            beats=beats,
            stack=os.memfd_create(f"engine-stack-{rank}"),
        )
        inherit = [beats, store, *launch.steps.descriptors, *(results.descriptors if results is not None else ())]
        return WorkerProcess(self.worker, launch, self._beats[rank], inherit)

    def _collect(self) -> None:
        """Wait for the result of the oldest step, and give it to who holds that.

        The engine's next step mostly follows as soon as that is taken in and the step planned: it is announced here. If
        there is none, workers spin for it once, and sleep.
        """
        workers = self._running()
        try:
            message = self._reader.receive()
        except RingClosedError as closed:
            raise self._failure(closed) from None
        self._writer.announce()
        result = self._decoder.decode(message)
        pending = self._under_way.popleft()
        workers.oldest = (self._under_way[0].step, time.monotonic()) if self._under_way else None
        pending.complete(result)

    def _interrupt(self, reason: str) -> None:
        """Wake who waits for a ring. Called in the workers' thread."""
        self._steps.interrupt(reason)
        self._results.interrupt(reason)

    def _running(self) -> Workers:
        if self._workers is None:
            raise ExecutorError("the executor is shut down; make a new engine")
        return self._workers

    def _failure(self, closed: RingClosedError) -> Exception:
        """Why there is no ring any more."""
        failure = self._running().failure
        return ExecutorError(str(failure)) if failure is not None else closed


def refuses_system() -> str | None:
    """Why workers cannot be watched here; None if they can."""
    if sys.platform != "linux":
        return "it watches its processes by pidfd, which Linux alone has; use --executor uniproc"
    return None
