"""A worker as a Ray actor: its calls carry steps and messages, the return values carry results."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections import deque
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import msgspec

from engine.core.distributed import MeetingPoint
from engine.core.executors import Answer, MessageDecoder, encode
from engine.core.shm import RingTimeoutError
from engine.core.startup import Phases
from engine.core.types import StepResult
from engine.plugins.executors.control_messages import Assignment, Failed, Progressed, Ready
from engine.plugins.executors.heartbeat import WorkerHeartbeat
from engine.plugins.executors.stacks import busy_stack
from engine.plugins.executors.worker_loop import StepRunner, WorkerLoop, make_runner


class ActorLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where Ray has placed an actor."""

    node: str
    """Ray's id of the node."""
    host: str
    """Address of the node."""
    process: int
    """Process id on the node."""
    gpus: tuple[str, ...]
    """The node's GPUs that are reserved for this actor."""
    meeting: str
    """Meeting point of the ranks (Rendezvous.place); empty unless asked for."""


class ActorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to run, on which GPUs."""

    assignment: Assignment
    gpus: str
    """GPUs of the node that belong to any actor of this engine, as in CUDA_VISIBLE_DEVICES; empty on a CPU."""


class StepQueue:
    """Puts the steps and control calls of concurrent actor calls in order and matches results to actor calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[bytes, Future[bytes]]] = {}
        self._steps: SimpleQueue[bytes] = SimpleQueue()
        self._waiting: deque[Future[bytes]] = deque()

    def put(self, number: int, step: bytes) -> Future[bytes]:
        """Add step `number`, counted from 0; calls may arrive in any order. Returns the future of its result."""
        future: Future[bytes] = Future()
        with self._lock:
            self._early[number] = step, future
            while self._next in self._early:
                next_step, waiting = self._early.pop(self._next)
                self._waiting.append(waiting)
                self._steps.put(next_step)
                self._next += 1
        return future

    def get(self, timeout: float) -> bytes:
        """Return the next step in order. Raises RingTimeoutError after `timeout` seconds."""
        try:
            return self._steps.get(timeout=timeout)
        except Empty:
            raise RingTimeoutError(f"no step has come for {timeout:g} s") from None

    def resolve(self, result: bytes) -> None:
        """Set the result of the oldest step without one."""
        self._waiting.popleft().set_result(result)


class RankActor:
    """One rank. Ray runs calls in threads of its own; the model runs in the thread `worker`."""

    def __init__(self) -> None:
        self._steps = StepQueue()
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._heartbeat = WorkerHeartbeat.private()
        self._meeting: MeetingPoint | None = None

    def locate(self, meeting: bool) -> bytes:
        """Return an ActorLocation; meeting: whether the ranks meet at this actor."""
        import ray

        host = ray.util.get_node_ip_address()
        if meeting:
            self._meeting = MeetingPoint(host)
        return encode(
            ActorLocation(
                node=ray.get_runtime_context().get_node_id(),
                host=host,
                process=os.getpid(),
                gpus=tuple(map(str, ray.get_gpu_ids())),
                meeting=self._meeting.place if self._meeting is not None else "",
            )
        )

    def begin(self, message: bytes) -> None:
        """Start the model as an ActorLaunch says; `listen` returns its progress."""
        launch = MessageDecoder[ActorLaunch](ActorLaunch).decode(message)
        if launch.gpus:  # Ray shows each actor its own GPUs only; peer memory access needs those of all actors
            os.environ["CUDA_VISIBLE_DEVICES"] = launch.gpus
        threading.Thread(target=self._work, args=(launch.assignment,), name="worker", daemon=True).start()

    def listen(self) -> bytes:
        """Wait for the next message (FromWorker) and return it."""
        return self._messages.get()

    def step(self, number: int, step: bytes) -> bytes:
        """Compute a step, or run a control call, and wait for it.

        Returns the result of a step on rank 0, nothing on other ranks; the answer of a call on every rank.
        """
        return self._steps.put(number, step).result()

    def stack(self) -> tuple[int, str, str]:
        """Return how many steps were begun, the busy thread's stack in a sentence, and the stacks of all."""
        file = os.memfd_create("engine-stack")
        try:
            faulthandler.dump_traceback(file, all_threads=True)
            dump = os.pread(file, 2**16, 0).decode(errors="replace")
            return self._heartbeat.begun, busy_stack(dump, self._heartbeat.busy_threads), dump
        finally:
            os.close(file)

    def _work(self, assignment: Assignment) -> None:
        link = _CallLink(self._steps, self._messages, assignment.rendezvous.rank)
        WorkerLoop(assignment, self._heartbeat, link).run(lambda phases: self.make_runner(assignment, phases))

    def make_runner(self, assignment: Assignment, phases: Phases) -> StepRunner:
        """Make the runner, in the thread of the model."""
        if self._meeting is not None:
            with phases.phase("import"):
                self._meeting.serve()
        return make_runner(assignment, phases)


class _CallLink:
    """ExecutorLink over the calls of an actor."""

    def __init__(self, steps: StepQueue, messages: SimpleQueue[bytes], rank: int) -> None:
        self._steps = steps
        self._messages = messages
        self._rank = rank

    def receive(self, timeout: float) -> bytes:
        return self._steps.get(timeout)

    def send_result(self, result: StepResult) -> None:
        self._steps.resolve(encode(result) if self._rank == 0 else b"")

    def send_answer(self, answer: Answer) -> None:
        self._steps.resolve(encode(answer))

    def report(self, message: Progressed | Ready) -> None:
        self._messages.put(encode(message))

    def fail(self, failed: Failed) -> None:
        """Report the error; the executor then kills the actor."""
        self._messages.put(encode(failed))
