"""All worker processes of an executor, and the thread that starts, watches and stops them."""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.core.errors import EngineError, ExecutorError
from engine.core.executors import Answer
from engine.core.startup import Listener
from engine.core.types import CacheInfo
from engine.plugins.executors.control_messages import Failed, Progressed, Ready
from engine.plugins.executors.worker_process import WorkerProcess

STOP_SECONDS = 3.0
"""Time for workers to exit after the ring of steps has ended; then they are killed."""
STACK_SECONDS = 1.0
"""Time for hung workers to write their stack dumps."""
ROOT_CAUSE_SECONDS = 0.25
"""With several workers, delay before a worker's error is raised: another worker's exit may have caused it."""
CHECK_SECONDS = 1.0
"""Maximum time between two checks for a hung step."""

log = logging.getLogger(__name__)


class OldestStep(NamedTuple):
    """The oldest step in flight, which may be finished while no one has asked for its result."""

    number: int
    steps_before: int
    """How many steps were submitted before it."""
    since: float
    """Since when it is the oldest, time.monotonic()."""


class Workers:
    """The worker processes of one executor. If one fails, all are killed."""

    def __init__(
        self, makers: Sequence[Callable[[], WorkerProcess]], interrupt: Callable[[str], None], step_timeout: float
    ) -> None:
        """makers: each starts one worker; interrupt: called once, in the watching thread, when no step can run.

        step_timeout: seconds after which the oldest in-flight step, or a control call, counts as hung.
        """
        self.failure: EngineError | None = None
        """Why no step can run any more."""
        self.oldest: OldestStep | None = None
        """The executor sets it."""
        self.workers: list[WorkerProcess] = []
        """By rank."""
        self._call: tuple[str, float] | None = None
        """Name of the control call in progress, and since when (time.monotonic())."""
        self._answered: set[int] = set()
        """Ranks that have answered the control call."""
        self._answers: queue.SimpleQueue[tuple[int, Answer] | EngineError] = queue.SimpleQueue()
        self._makers = makers
        self._interrupt = interrupt
        self._step_timeout = step_timeout
        self._events: queue.SimpleQueue[tuple[int, Progressed | Ready] | EngineError] = queue.SimpleQueue()
        self._errors: list[EngineError] = []
        self._verdict_at = 0.0
        self._started = False
        self._stop_by: float | None = None
        self._killed = False
        """Whether the workers were killed; they may take seconds to exit."""
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)

    def start(self, listener: Listener | None) -> list[CacheInfo]:
        """Start all workers and wait until they are ready; return their cache infos, by rank.

        Raises the first error.
        """
        self._thread.start()
        caches: dict[int, CacheInfo] = {}
        while len(caches) < len(self._makers):
            match self._events.get():
                case _, Progressed(progress):
                    if listener is not None:
                        listener(progress)
                case rank, Ready(cache):
                    caches[rank] = cache
                case EngineError() as error:
                    raise error
        self._started = True
        return [caches[rank] for rank in sorted(caches)]

    def wait_for_answers(self, number: int, name: str) -> list[Answer]:
        """Wait until all workers have answered control call `number`; return their answers, by rank.

        Raises ExecutorError if a worker has failed, or does not answer within the step timeout.
        """
        answers: dict[int, Answer] = {}
        self._answered.clear()
        self._call = name, time.monotonic()
        try:
            while len(answers) < len(self.workers):
                match self._answers.get():
                    case rank, Answer() as answer:
                        if answer.number == number:  # otherwise of a call whose caller was interrupted
                            answers[rank] = answer
                            self._answered.add(rank)
                    case EngineError() as error:
                        raise ExecutorError(str(error)) from error
        finally:
            self._call = None
        return [answers[rank] for rank in sorted(answers)]

    def stop(self) -> None:
        """Wait until all workers have exited, killing those that take too long.

        The caller has ended the ring of steps, upon which ready workers exit.
        """
        if self._thread.ident is not None:
            self._stop_by = time.monotonic() + (STOP_SECONDS if self._started else 0.0)
            self._wake_sender.send(b"s")
            self._thread.join()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _run(self) -> None:
        """Start the workers, watch them until all have exited, and clean up."""
        try:
            for make in self._makers:
                self.workers.append(make())
            self._watch()
        except Exception as error:  # must reach a caller that waits for a worker
            log.exception("the thread that watches the workers failed")
            self._fail(ExecutorError(f"the workers could not be started or watched: {type(error).__name__}: {error}"))
        finally:
            for worker in self.workers:
                if worker.alive:
                    worker.kill()
                    worker.reap()
                worker.close()

    def _watch(self) -> None:
        """Handle messages, exits and hung steps until all workers have exited."""
        poller = select.poll()
        poller.register(self._wake_receiver, select.POLLIN)
        for worker in self.workers:
            poller.register(worker.connection, select.POLLIN)
            poller.register(worker.pidfd, select.POLLIN)
        interval = min(CHECK_SECONDS, self._step_timeout / 4)
        while any(worker.alive for worker in self.workers):
            readable = {descriptor for descriptor, _ in poller.poll(1000 * self._poll_timeout(interval))}
            if self._wake_receiver.fileno() in readable:
                poller.unregister(self._wake_receiver)
            for worker in self.workers:
                if worker.connection.fileno() in readable and not self._receive(worker):
                    poller.unregister(worker.connection)
                if worker.pidfd in readable:
                    self._receive(worker)
                    poller.unregister(worker.pidfd)
                    worker.reap()
                    self._handle_exit(worker)
            now = time.monotonic()
            if self._errors and now >= self._verdict_at:
                self._fail(self._errors[0])
            if self._stop_by is not None and now >= self._stop_by:
                self._kill()
            self._check_hung(now)
        if self._errors:  # all workers have exited before the verdict
            self._fail(self._errors[0])

    def _poll_timeout(self, interval: float) -> float:
        """Timeout of the next poll, seconds."""
        if self._killed:
            return interval
        until = [time.monotonic() + interval]
        if self._stop_by is not None:
            until.append(self._stop_by)
        if self._errors:
            until.append(self._verdict_at)
        return max(0.0, min(until) - time.monotonic())

    def _receive(self, worker: WorkerProcess) -> bool:
        """Handle all messages that a worker has sent; return whether more may come."""
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
                    self._record_error(message.error(str(worker)))
                case Ready() | Progressed():
                    worker.phase = message.progress.phase if isinstance(message, Progressed) else ""
                    self._events.put((worker.rank, message))
                case Answer():
                    self._answers.put((worker.rank, message))

    def _record_error(self, error: EngineError) -> None:
        """Note a worker's error; it is raised later, because the exit of another worker may be its cause."""
        if not self._errors:
            self._verdict_at = time.monotonic() + (ROOT_CAUSE_SECONDS if len(self.workers) > 1 else 0.0)
        self._errors.append(error)

    def _handle_exit(self, worker: WorkerProcess) -> None:
        """Fail all workers if one exited without being asked to and without reporting an error."""
        if self._stop_by is None and not any(str(worker) in str(error) for error in self._errors):
            self._fail(ExecutorError(worker.exit_status))

    def _check_hung(self, now: float) -> None:
        """Kill all workers if one has not finished the oldest step or a control call in time; report where it hangs."""
        if self.failure is not None:
            return
        oldest, call = self.oldest, self._call
        alive = [worker for worker in self.workers if worker.alive]
        if oldest is not None and now - oldest.since > self._step_timeout:
            what = f"step {oldest.number}"
            late = [worker for worker in alive if worker.heartbeat.finished <= oldest.steps_before]
        elif oldest is None and call is not None and now - call[1] > self._step_timeout:
            what = f"the control call {call[0]}"
            late = [worker for worker in alive if worker.rank not in self._answered]
        else:
            return
        if not late:
            return
        late.sort(key=lambda worker: worker.heartbeat.begun)  # a worker that has not begun keeps the others waiting
        for worker in late:
            worker.request_stack()
        stacks = [(worker, *worker.read_stack(now + STACK_SECONDS)) for worker in late]
        for worker, _, dump in stacks:
            log.error("%s has not finished %s\n%s", str(worker), what, dump.rstrip())
        took = f"{what} took more than {self._step_timeout:g} s (option step_timeout)"
        worker, stack, _ = stacks[0]
        self._fail(ExecutorError(f"{took}; {worker}: {stack}"))

    def _fail(self, error: EngineError) -> None:
        """Record why no step can run any more, wake all waiting callers and kill all workers."""
        if self.failure is None and self._stop_by is None:
            self.failure = error
            self._interrupt(str(error))
            self._events.put(error)
            self._answers.put(error)
        self._kill()

    def _kill(self) -> None:
        """Kill all workers; a second call does nothing."""
        if self._killed:
            return
        self._killed = True
        for worker in self.workers:
            if worker.alive:
                worker.kill()
