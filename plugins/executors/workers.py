"""All workers of an executor, and the thread that starts, watches and stops them."""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from engine.core.errors import EngineError, ExecutorError
from engine.core.startup import Listener
from engine.core.types import CacheInfo
from engine.plugins.executors.messages import Failed, Progressed, Ready
from engine.plugins.executors.worker_process import WorkerProcess

STOP_SECONDS = 3.0
"""What workers get to end in order; then they are killed."""
STACK_SECONDS = 1.0
"""What those that hang get to write their stacks."""
LINGER = 0.25
"""Seconds from a worker's error to the verdict, where there are others: one that died may have been its cause."""
TICK = 1.0
"""Seconds between two looks at the step under way."""

log = logging.getLogger(__name__)


class Workers:
    """Processes of one executor. One that fails ends all."""

    def __init__(
        self, makers: Sequence[Callable[[], WorkerProcess]], interrupt: Callable[[str], None], step_timeout: float
    ) -> None:
        """makers: start one each; interrupt: called once, in the thread, when no step can be run any more."""
        self.failure: EngineError | None = None
        """Why no step can be run any more."""
        self.oldest: tuple[int, float] | None = None
        """(number of the step that is due next, when it became so, time.monotonic()); the executor writes it."""
        self.workers: list[WorkerProcess] = []
        """By rank."""
        self._makers = makers
        self._interrupt = interrupt
        self._step_timeout = step_timeout
        self._news: queue.SimpleQueue[tuple[int, Progressed | Ready] | EngineError] = queue.SimpleQueue()
        self._suspected: list[EngineError] = []
        self._verdict_at = 0.0
        self._started = False
        self._stop_by: float | None = None
        self._wakened, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)

    def start(self, listener: Listener | None) -> list[CacheInfo]:
        """Start all, and wait until they are ready: what each says, by rank. Raises the first that fails."""
        self._thread.start()
        caches: dict[int, CacheInfo] = {}
        while len(caches) < len(self._makers):
            match self._news.get():
                case _, Progressed(progress):
                    if listener is not None:
                        listener(progress)
                case rank, Ready(cache):
                    caches[rank] = cache
                case EngineError() as error:
                    raise error
        self._started = True
        return [caches[rank] for rank in sorted(caches)]

    def stop(self) -> None:
        """End all; returns when they are dead. Those that work have been told by the end of their ring."""
        if self._thread.ident is not None:
            self._stop_by = time.monotonic() + (STOP_SECONDS if self._started else 0.0)
            self._waker.send(b"s")
            self._thread.join()
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        """The thread's life, which is longer than that of each worker."""
        try:
            for make in self._makers:
                self.workers.append(make())
            self._watch()
        except Exception as error:  # whoever waits for a worker must hear of it
            log.exception("the thread that watches the workers failed")
            self._fail(ExecutorError(f"the workers could not be started or watched: {type(error).__name__}: {error}"))
        finally:
            for worker in self.workers:
                if worker.alive:
                    worker.kill()
                    worker.reap()
                worker.close()

    def _watch(self) -> None:
        """Until all are dead."""
        poller = select.poll()
        poller.register(self._wakened, select.POLLIN)
        for worker in self.workers:
            poller.register(worker.connection, select.POLLIN)
            poller.register(worker.death, select.POLLIN)
        tick = min(TICK, self._step_timeout / 4)
        while any(worker.alive for worker in self.workers):
            readable = {descriptor for descriptor, _ in poller.poll(1000 * self._patience(tick))}
            if self._wakened.fileno() in readable:
                poller.unregister(self._wakened)
            for worker in self.workers:
                if worker.connection.fileno() in readable and not self._listen(worker):
                    poller.unregister(worker.connection)
                if worker.death in readable:
                    self._listen(worker)
                    poller.unregister(worker.death)
                    worker.reap()
                    self._died(worker)
            now = time.monotonic()
            if self._suspected and now >= self._verdict_at:
                self._fail(self._suspected[0])
            if self._stop_by is not None and now >= self._stop_by:
                self._kill()
            self._look_at_step(now)
        if self._suspected:  # all have gone before the verdict
            self._fail(self._suspected[0])

    def _patience(self, tick: float) -> float:
        """Seconds until something is to be done even if nothing happens."""
        until = [time.monotonic() + tick]
        if self._stop_by is not None:
            until.append(self._stop_by)
        if self._suspected:
            until.append(self._verdict_at)
        return max(0.0, min(until) - time.monotonic())

    def _listen(self, worker: WorkerProcess) -> bool:
        """Take what a worker says; False: it will say no more."""
        while True:
            try:
                message = worker.connection.receive()
            except BlockingIOError:
                return True
            match message:
                case None:
                    return False
                case Failed():
                    if message.unexpected:
                        log.error("%s failed in %s\n%s", str(worker), message.phase, message.traceback.rstrip())
                    self._suspect(message.error(str(worker)))
                case Ready() | Progressed():
                    worker.phase = message.progress.phase if isinstance(message, Progressed) else ""
                    self._news.put((worker.rank, message))

    def _suspect(self, error: EngineError) -> None:
        """A worker has failed: through its own fault, or because another is gone."""
        if not self._suspected:
            self._verdict_at = time.monotonic() + (LINGER if len(self.workers) > 1 else 0.0)
        self._suspected.append(error)

    def _died(self, worker: WorkerProcess) -> None:
        if self._stop_by is None and not any(str(worker) in str(error) for error in self._suspected):
            self._fail(ExecutorError(worker.fate))

    def _look_at_step(self, now: float) -> None:
        """End all if a step takes too long, and say where it hangs."""
        oldest = self.oldest
        if oldest is None or self.failure is not None or now - oldest[1] <= self._step_timeout:
            return
        number, _ = oldest
        late = [worker for worker in self.workers if worker.alive and worker.beat.finished < number]
        late.sort(key=lambda worker: worker.beat.begun)  # who has not even begun keeps the others waiting
        for worker in late:
            worker.ask_stack()
        stacks = [(worker, *worker.stack(now + STACK_SECONDS)) for worker in late]
        for worker, _, whole in stacks:
            log.error("%s has not finished step %d\n%s", str(worker), number, whole.rstrip())
        places = [f"{worker}: {place}" for worker, place, _ in stacks[:1]] or ["all workers have finished it"]
        self._fail(
            ExecutorError(f"step {number} took more than {self._step_timeout:g} s (option step_timeout); {places[0]}")
        )

    def _fail(self, error: EngineError) -> None:
        """No step can be run any more."""
        if self.failure is None and self._stop_by is None:
            self.failure = error
            self._interrupt(str(error))
            self._news.put(error)
        self._kill()

    def _kill(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.kill()
