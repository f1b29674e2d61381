"""Runs the model in worker processes: steps and results travel over rings in shared memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from attrs import evolve, field, frozen, validators

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed import Rendezvous
from engine.core.errors import ExecutorError
from engine.core.executors import Deployment, Health, PendingResult, answer_values, encode, encode_call
from engine.core.host import Host
from engine.core.shm import Ring, RingClosedError
from engine.core.types import CacheInfo, Step
from engine.plugins.executors.control_messages import Launch
from engine.plugins.executors.heartbeat import HeartbeatTable
from engine.plugins.executors.pending import Pending
from engine.plugins.executors.remote import RemoteExecutor, common_cache
from engine.plugins.executors.worker_process import WorkerProcess
from engine.plugins.executors.workers import OldestStep, Workers


@frozen
class Options:
    """[executor.options]."""

    step_timeout: float = field(default=300.0, validator=validators.gt(0))
    """Seconds after which a step, or a control call, counts as hung: all workers are then killed."""


class MultiprocExecutor(RemoteExecutor):
    """Starts one worker (`plugins/executors/worker.py`) per rank. All workers receive every step; rank 0 answers.

    As `multiproc` it has one rank; `tp` derives from it for several.
    """

    options_class = Options
    worker: ClassVar[str] = "engine.plugins.executors.worker"
    """The module that a worker process runs."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        if config.executor.tensor_parallel > 1:
            return f"it runs one device, not {config.executor.tensor_parallel}; use --executor tp, or --tp 1"
        return refuses_system()

    def __init__(self, deployment: Deployment, options: Options) -> None:
        super().__init__(deployment)
        self._options = options
        self._workers: Workers | None = None
        self._calls = 0
        """Number of control calls so far."""
        self._collected = 0
        """Number of steps whose results were received."""

    def start(self) -> CacheInfo:
        """Start the workers and wait until all are ready.

        Raises the error of the first worker that failed, with its rank and phase.
        """
        ranks = self._config.executor.tensor_parallel
        self._steps, self._results = Ring.create(readers=ranks), Ring.create(readers=1)
        self._writer, self._reader = self._steps.writer(), self._results.reader(0)
        self._memory = (HeartbeatTable.create(ranks), os.memfd_create("engine-store"))
        self._heartbeats = HeartbeatTable(self._memory[0], ranks).rows()
        makers = [partial(self._make_worker, rank) for rank in range(ranks)]
        self._workers = Workers(makers, self._interrupt, self._options.step_timeout)
        try:
            caches = self._workers.start(self._listener)
        except BaseException:
            self.shutdown()
            raise
        return common_cache(caches)

    def submit(self, step: Step) -> PendingResult:
        workers = self._running()
        self._check_room(step)
        try:
            self._writer.send(encode(step))
        except RingClosedError as closed:
            raise self._failure(closed) from None
        pending = Pending(step.id, self._collect, self._reader.ready)
        self._in_flight.append(pending)
        if len(self._in_flight) == 1:
            workers.oldest = OldestStep(step.id, self._collected, time.monotonic())
        return pending

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        workers = self._running()
        self._calls += 1
        try:
            self._writer.send(encode_call(self._calls, name, arguments))
        except RingClosedError as closed:
            raise self._failure(closed) from None
        while self._in_flight:  # the ring needs room for these results, which rank 0 sends before it answers
            self._collect()
        return answer_values(workers.wait_for_answers(self._calls, name), workers.workers)

    def check(self) -> Health:
        """Return whether all workers run, and the oldest heartbeat among the idle ones."""
        if self._workers is None:
            return Health(ok=False, detail="the executor is shut down")
        if self._workers.failure is not None:
            return Health(ok=False, detail=str(self._workers.failure))
        idle = [(row.time, rank) for rank, row in enumerate(self._heartbeats) if row.begun == row.finished]
        if not idle:
            return Health(ok=True)
        heartbeat, rank = min(idle)
        return Health(ok=True, heartbeat=heartbeat, rank=rank)

    def shutdown(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            self._writer.close()
            workers.stop()
            self._steps.close()
            self._results.close()
            del self._steps, self._results, self._writer, self._reader  # frees the rings' memory
            for descriptor in self._memory:
                os.close(descriptor)

    def _make_worker(self, rank: int) -> WorkerProcess:
        """Start the worker of a rank, on the device `rank` places after the first one."""
        heartbeats, store = self._memory
        ranks = self._config.executor.tensor_parallel
        results = self._results.handle if rank == 0 else None
        config, device = self._config, self._device
        if device.type == "cpu" and ranks > 1 and not config.executor.threads:
            threads = max(1, Host().cores() // ranks)
            config = evolve(config, executor=evolve(config.executor, threads=threads))
        launch = Launch(
            config=config,
            executor=f"{type(self).__module__}:{type(self).__qualname__}",
            manifest=self._manifest,
            device=evolve(device, index=device.index + rank).torch_name,
            first_device=device,
            rendezvous=Rendezvous(rank=rank, ranks=ranks, place=f"/proc/self/fd/{store}"),
            speculates=self._speculates,
            steps=self._steps.handle,
            results=results,
            heartbeats=heartbeats,
            stack=os.memfd_create(f"engine-stack-{rank}"),
        )
        inherit = [heartbeats, store, *launch.steps.descriptors, *(results.descriptors if results is not None else ())]
        return WorkerProcess(self.worker, launch, self._heartbeats[rank], inherit)

    def _collect(self) -> None:
        """Wait for the result of the oldest in-flight step and resolve its Pending.

        The engine mostly submits its next step as soon as it has planned it from this result, so the next step is
        announced here. If no step follows, workers spin once for nothing and sleep.
        """
        workers = self._running()
        try:
            message = self._reader.receive()
        except RingClosedError as closed:
            raise self._failure(closed) from None
        self._writer.announce()
        result = self._decoder.decode(message)
        pending = self._in_flight.popleft()
        self._collected += 1
        oldest = self._in_flight[0].step if self._in_flight else None
        workers.oldest = None if oldest is None else OldestStep(oldest, self._collected, time.monotonic())
        pending.complete(result)

    def _interrupt(self, reason: str) -> None:
        """End both rings, which wakes all waiting threads. Called in the thread that watches the workers."""
        self._steps.interrupt(reason)
        self._results.interrupt(reason)

    def _running(self) -> Workers:
        if self._workers is None:
            raise ExecutorError("the executor is shut down; make a new engine")
        return self._workers

    def _failure(self, closed: RingClosedError) -> Exception:
        """The error to raise after a ring has ended."""
        failure = self._running().failure
        return ExecutorError(str(failure)) if failure is not None else closed


def refuses_system() -> str | None:
    """Return why workers cannot be watched on this system; None if they can."""
    if sys.platform != "linux":
        return "it watches its processes by pidfd, which only Linux has; use --executor uniproc"
    return None
