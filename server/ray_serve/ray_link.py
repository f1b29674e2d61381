"""A front end's link to the engine replicas: each request is one streaming call, which Ray Serve routes."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from engine.core.config import EngineConfig
from engine.core.executors import MessageDecoder, encode
from engine.core.types import Request
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.engine_link import EngineLink
from engine.server.front_end.errors import ApiError
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.ray_serve.messages import Answer, Controlled, Declined, Ended, Produced, Run, Stop
from engine.server.shared.heartbeat import Fault
from engine.server.shared.messages import Abort, Add, Control, ControlAnswer, FrontEndToEngine, Outputs
from engine.server.shared.metrics_table import MetricsTable
from engine.server.shared.packed_logprobs import PackedLogprobs

MAX_DECLINED = 8
"""Replicas that may decline a request, one after another, before it fails."""
DECLINED_PAUSE = 0.2
"""Seconds before the next attempt, in which Ray Serve may replace a replica."""

log = logging.getLogger(__name__)


class EngineCall:
    """One call of an engine replica, as its argument. The replica receives only `message`.

    The router (call_placement.py) has the same object, in another thread, and reads from it what the call costs now.
    """

    def __init__(self, request: Request, choices: int) -> None:
        self.request = request
        self.choices = choices
        self.ticket = uuid.uuid4().hex
        self.message = encode(Run(self.ticket, request, choices))
        self.replica = ""
        """Name of the replica that the call was sent to; set by the router."""
        self.prompt_cost = self.output_cost = 0
        """Cost at that replica (routing.Placement), tokens; set by the router."""
        self.has_tokens = False
        self.ended = False
        self.declined: set[str] = set()
        """Replicas that have declined the call."""

    @property
    def load(self) -> int:
        """What the call costs its replica from now on, tokens."""
        return self.choices * self.output_cost + (0 if self.has_tokens else self.prompt_cost)

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.message,)


class TargetedCall:
    """The argument of a call to a certain replica, which receives only `message`."""

    def __init__(self, replica: str, message: bytes) -> None:
        """replica: its name."""
        self.replica = replica
        self.message = message

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.message,)


FaultReader = Callable[[], Fault | None]
"""Returns why no replica can answer, or None."""


class RayClient(EngineClient):
    """A front end's client of all engine replicas, over one link."""

    def __init__(self, config: EngineConfig, metrics_table: MetricsTable, engines: Any, fault: FaultReader) -> None:
        """engines: Ray's handle of the deployment."""
        self._engines = engines
        self._fault_reader = fault
        super().__init__(config, metrics_table, 0)

    def _make_link(
        self, context: zmq.Context[zmq.Socket[bytes]], replica: int, on_outputs: Callable[[Outputs], None]
    ) -> EngineLink:
        notify, fail = self._notify_groups, self.fail_requests
        return RayLink(context, on_outputs, notify, self.phases, fail, self._engines, self._fault_reader)


class RayLink(EngineLink):
    """A link whose only replica is the whole deployment of engines."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_outputs: Callable[[Outputs], None],
        on_batch_end: Callable[[], None],
        phases: PhaseTimes,
        on_failure: Callable[[Iterable[int], ApiError], None],
        engines: Any,
        fault: FaultReader,
    ) -> None:
        """on_failure: called with the requests that have failed. engines, fault: see RayClient."""
        super().__init__(context, 0, on_outputs, on_batch_end, phases)
        self._on_failure = on_failure
        self._engines = engines
        self._generate = engines.options(method_name="generate", stream=True)
        self._stop = engines.options(method_name="stop")
        self._fault_reader = fault
        self._answers: MessageDecoder[Answer] = MessageDecoder(Answer)
        self._controls: MessageDecoder[Controlled] = MessageDecoder(Controlled)
        self._calls: dict[int, _OpenCall] = {}
        """The call of each request that has not ended, by the request's number."""
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: FrontEndToEngine) -> None:
        match message:
            case Add(first, requests, choices):
                for request in requests:
                    self._start(_OpenCall(EngineCall(request, choices), first))
                    first += choices
            case Abort(numbers):
                self._abort(numbers)
            case Control():
                self._keep(asyncio.get_running_loop().create_task(self._control(message)))

    def fault(self, timeout: float) -> Fault | None:
        return self._fault_reader()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, call: _OpenCall) -> None:
        self._calls |= dict.fromkeys(call.numbers, call)
        # In a context of its own: Ray Serve would treat all calls made for one HTTP request as one call.
        call.task = asyncio.get_running_loop().create_task(self._run(call), context=contextvars.Context())
        self._keep(call.task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(self, message: Control) -> None:
        """Run a control call on all replicas; the value is {"engines": {name of the replica: its value}}."""
        values: dict[str, Any] = {}
        answer = ControlAnswer(message.number, {"engines": values})
        try:
            for data in await self._engines.broadcast("control", encode(message)).results_async():
                one = self._controls.decode(data)
                if one.answer.error:
                    error = f"replica {one.replica}: {one.answer.error}"
                    answer = ControlAnswer(message.number, error=error, busy=one.answer.busy)
                values[one.replica] = one.answer.value
        except Exception as error:  # Ray has many, for a replica that died or cannot be reached
            log.error("a control call failed: %s", error)
            answer = ControlAnswer(message.number, error=f"a replica of the engine failed: {_reason(error)}")
        self._on_outputs(Outputs([], [], [], [], None, [], [answer]))

    def _abort(self, numbers: Iterable[int]) -> None:
        stopped: dict[_OpenCall, list[int]] = {}
        for number in numbers:
            call = self._calls.pop(number, None)
            if call is not None:
                call.numbers.discard(number)
                stopped.setdefault(call, []).append(number - call.first)
        for call, choices in stopped.items():
            if not call.numbers and call.task is not None:
                call.task.cancel()
            elif call.argument.replica:
                stop = encode(Stop(call.argument.ticket, tuple(choices)))
                self._stop.remote(TargetedCall(call.argument.replica, stop))

    async def _run(self, call: _OpenCall) -> None:
        """Make the call, and deliver its answers until all its requests have ended."""
        try:
            while (declined := await self._attempt(call)) is not None:
                call.argument.declined.add(declined.replica)
                if len(call.argument.declined) == MAX_DECLINED:
                    raise _failed(declined.reason)
                await asyncio.sleep(DECLINED_PAUSE)
            if call.numbers:
                raise _failed("its answer ended early")
        except ApiError as error:
            self._fail(call, error)
        except Exception as error:  # Ray has many, for a replica that died or cannot be reached
            log.error("a call of replica %s failed: %s", call.argument.replica, error)
            self._fail(call, _failed(_reason(error)))
        finally:
            call.argument.ended = True
            for number in call.numbers:
                self._calls.pop(number, None)

    async def _attempt(self, call: _OpenCall) -> Declined | None:
        """Call a replica and deliver its answers. Raises ApiError for its refusal, and Ray's errors."""
        stream = self._generate.remote(call.argument)
        try:
            async for data in stream:
                match self._answers.decode(data):
                    case Produced(outputs):
                        call.argument.has_tokens = True
                        self._deliver(call, outputs)
                    case Ended(status, message, code):
                        raise ApiError(status, message, code=code)
                    case Declined() as declined:
                        return declined
        except BaseException:
            stream.cancel()
            raise
        return None

    def _deliver(self, call: _OpenCall, outputs: Outputs) -> None:
        first = call.first
        for choice, output in outputs.full:
            if output.finish_reason is not None:
                call.numbers.discard(first + choice)
                self._calls.pop(first + choice, None)
        self._on_outputs(
            Outputs(
                [first + choice for choice in outputs.numbers],
                outputs.counts,
                outputs.tokens,
                [(first + choice, output) for choice, output in outputs.full],
                None,
                [PackedLogprobs(first + one.number, one.slices) for one in outputs.prompt_logprobs],
            )
        )
        self._on_batch_end()

    def _fail(self, call: _OpenCall, error: ApiError) -> None:
        numbers = list(call.numbers)
        for number in numbers:
            self._calls.pop(number, None)
        self._on_failure(numbers, error)


class _OpenCall:
    """A call that has not ended."""

    def __init__(self, argument: EngineCall, first: int) -> None:
        """first: number of the first choice."""
        self.argument = argument
        self.first = first
        self.numbers = set(range(first, first + argument.choices))
        """Numbers of the choices that have not ended."""
        self.task: asyncio.Task[None] | None = None


def _failed(reason: str) -> ApiError:
    message = f"a replica of the engine failed: {reason}; its other requests failed too; send this one again"
    return ApiError(503, message, code="engine_failed")


def _reason(error: Exception) -> str:
    """What happened, without Ray's advice for the replica's developer."""
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died, or its machine cannot be reached"
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
