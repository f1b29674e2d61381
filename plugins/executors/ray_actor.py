"""A worker that Ray starts: an actor. Its calls carry the steps, and the answers to them the results."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections import deque
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import msgspec

from engine.core.distributed import MeetingPoint
from engine.core.executors import MessageDecoder, encode
from engine.core.shm import RingTimeoutError
from engine.core.startup import Phases
from engine.core.types import StepResult
from engine.plugins.executors.messages import Assignment, Failed, Progressed, Ready
from engine.plugins.executors.progress import COLUMNS, Beat
from engine.plugins.executors.worker_loop import StepRunner, WorkerLoop, make_runner


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Where Ray has put an actor."""

    node: str
    """Ray's number of the node."""
    host: str
    """The node's address."""
    process: int
    gpus: tuple[str, ...]
    """Of the node's, those that are this actor's alone."""
    meeting: str
    """See Rendezvous.place; empty unless asked for."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to do."""

    assignment: Assignment
    gpus: str
    """Those of the node that this engine's actors have, as in CUDA_VISIBLE_DEVICES; empty on a CPU."""


class Inbox:
    """Steps in their order, and who waits for their results; the calls of a threaded actor come in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[bytes, Future[bytes]]] = {}
        self._steps: SimpleQueue[bytes] = SimpleQueue()
        self._waiting: deque[Future[bytes]] = deque()

    def put(self, number: int, step: bytes) -> Future[bytes]:
        """Step `number`, counted from 0, has come; its result will."""
        future: Future[bytes] = Future()
        with self._lock:
            self._early[number] = step, future
            while self._next in self._early:
                due, waiting = self._early.pop(self._next)
                self._waiting.append(waiting)
                self._steps.put(due)
                self._next += 1
        return future

    def take(self, timeout: float) -> bytes:
        """The next step. Raises RingTimeoutError after so many seconds."""
        try:
            return self._steps.get(timeout=timeout)
        except Empty:
            raise RingTimeoutError(f"no step has come for {timeout:g} s") from None

    def answer(self, result: bytes) -> None:
        """The result of the oldest step that was taken."""
        self._waiting.popleft().set_result(result)


class RankActor:
    """One rank. Calls run in threads of Ray's; the model runs in one of its own."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._beat = Beat(memoryview(bytearray(8 * COLUMNS)).cast("d"))
        self._meeting: MeetingPoint | None = None

    def whereabouts(self, meeting: bool) -> bytes:
        """Whereabouts; meeting: whether the ranks meet here."""
        import ray

        host = ray.util.get_node_ip_address()
        if meeting:
            self._meeting = MeetingPoint(host)
        return encode(
            Whereabouts(
                node=ray.get_runtime_context().get_node_id(),
                host=host,
                process=os.getpid(),
                gpus=tuple(map(str, ray.get_gpu_ids())),
                meeting=self._meeting.place if self._meeting is not None else "",
            )
        )

    def begin(self, order: bytes) -> None:
        """Start the model, as the message Begin says; `listen` tells how it goes."""
        begin = MessageDecoder[Begin](Begin).decode(order)
        if begin.gpus:  # Ray shows each actor its own alone; to read each other's memory, they must see all of ours
            os.environ["CUDA_VISIBLE_DEVICES"] = begin.gpus
        threading.Thread(target=self._work, args=(begin,), name="worker", daemon=True).start()

    def listen(self) -> bytes:
        """The next message, FromWorker; waits for it."""
        return self._messages.get()

    def step(self, number: int, step: bytes) -> bytes:
        """Compute a step; the result of rank 0, and nothing from the others. Waits for it."""
        return self._inbox.put(number, step).result()

    def stack(self) -> tuple[int, str]:
        """Number of the last step begun, and the stacks of all threads."""
        file = os.memfd_create("engine-stack")
        try:
            faulthandler.dump_traceback(file, all_threads=True)
            return self._beat.begun, os.pread(file, 2**16, 0).decode(errors="replace")
        finally:
            os.close(file)

    def _work(self, begin: Begin) -> None:
        assignment = begin.assignment
        wires = _Calls(self._inbox, self._messages, assignment.rendezvous.rank)
        WorkerLoop(assignment, self._beat, wires).run(lambda phases: self.make_runner(assignment, phases))

    def make_runner(self, assignment: Assignment, phases: Phases) -> StepRunner:
        """In the thread of the model."""
        if self._meeting is not None:
            with phases.phase("import"):
                self._meeting.serve()
        return make_runner(assignment, phases)


class _Calls:
    """See Wires."""

    def __init__(self, inbox: Inbox, messages: SimpleQueue[bytes], rank: int) -> None:
        self._inbox = inbox
        self._messages = messages
        self._rank = rank

    def receive(self, timeout: float) -> bytes:
        return self._inbox.take(timeout)

    def answer(self, result: StepResult) -> None:
        self._inbox.answer(encode(result) if self._rank == 0 else b"")

    def tell(self, message: Progressed | Ready) -> None:
        self._messages.put(encode(message))

    def fail(self, failed: Failed) -> None:
        """The executor ends the process when it has heard this."""
        self._messages.put(encode(failed))
