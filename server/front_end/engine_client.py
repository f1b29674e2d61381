"""A front end's client of the engine: submits requests, delivers outputs, fails the requests of a dead engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import ParamSpec, TypeVar

import attrs
import zmq

from engine.core.config import EngineConfig
from engine.core.types import FINISH_ERROR, FINISH_STOP, Output, Request
from engine.server.front_end.control_calls import ControlCalls
from engine.server.front_end.engine_link import EngineLink
from engine.server.front_end.errors import ApiError
from engine.server.front_end.open_request import OpenRequest, Prompt
from engine.server.front_end.phase_times import MeasuredPhaseTimes, PhaseTimes
from engine.server.front_end.request_group import RequestGroup
from engine.server.front_end.routing import Router
from engine.server.front_end.trace import EVENT_LOOP, FrontEndTrace
from engine.server.shared.messages import Abort, Add, ControlAnswer, EngineDown, Outputs, RecordSpans, Started
from engine.server.shared.metrics_table import MetricsTable
from engine.server.shared.request_metrics import ReplicaMetrics

MAX_TOKENS = 2**15
"""Tokens of several prompts sent in one message, since the engine reads a message without a pause."""

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class EngineClient:
    """One front end's links to all replicas. Use from the event loop's thread only."""

    def __init__(self, config: EngineConfig, metrics_table: MetricsTable, row: int) -> None:
        """row: this front end's row of the metrics table."""
        self.metrics_table = metrics_table
        self.metrics = metrics_table.rows[row]
        self._limits = limits = config.server
        self.phases = MeasuredPhaseTimes(self.metrics.phase_cells) if limits.phase_times else PhaseTimes()
        self._build_events = self.phases.timed("detokenize", _notify)
        self._write = self.phases.timed("write", self._write_all)
        self._cache = config.cache
        self._open: dict[int, OpenRequest] = {}
        self._next_number = 0
        self._updated_groups: list[RequestGroup] = []
        """Groups with new events that have not been notified."""
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []
        self._aborted: dict[int, list[int]] = {}
        """By replica, the numbers of requests whose abort has not been sent."""
        self._context = zmq.Context()
        self.links = [
            self._make_link(self._context, replica, partial(self._deliver, metrics))
            for replica, metrics in enumerate(self.metrics.replicas)
        ]
        self.control = ControlCalls(self.links)
        self._recorder = FrontEndTrace()
        self.trace: FrontEndTrace | None = None
        """Set while a trace is recorded."""
        self._delivering_since = 0
        """While a trace is recorded: when handling of received outputs began, time.monotonic_ns(); 0: no outputs."""
        self.router = Router([0] * limits.replicas, config.cache.block_size)

    def _make_link(
        self, context: zmq.Context[zmq.Socket[bytes]], replica: int, on_outputs: Callable[[Outputs], None]
    ) -> EngineLink:
        """Make the link to a replica, which calls `on_outputs` with each message."""
        return EngineLink(context, replica, on_outputs, self._notify_groups, self.phases)

    def connect(self, directory: str, name: str, started: Started) -> None:
        """Connect to an engine process that has started, under the ZeroMQ identity `name`.

        directory: the server's own. The router forgets the replica's prefixes: a new process has an empty cache.
        """
        self.links[started.replica].connect(directory, name, started)
        self.router.reset(started.replica, started.cache.reusable_indices if self._cache.prefix_caching else 0)

    def forget_prefixes(self, replica: int) -> None:
        """Note that the replica's prefix cache is empty.

        Other front ends learn it from the results of their own requests; until then they may prefer the replica for a
        prefix that it must compute.
        """
        started = self.links[replica].started
        if started is not None:
            self.router.reset(replica, started.cache.reusable_indices if self._cache.prefix_caching else 0)

    def submit(self, requests: Sequence[Request], choices: int = 1) -> RequestGroup:
        """Send `choices` choices of each request to the engine. Choice c of request i has the index i * choices + c.

        Raises ApiError if all replicas are down or server.max_waiting is reached.
        """
        begin = 0 if self.trace is None else time.monotonic_ns()
        loads = self._loads()
        max_open, num_open = self._limits.max_waiting, self.metrics_table.open_requests
        if num_open + len(requests) * choices > max_open:
            self.metrics.count_rejected("overloaded")
            raise ApiError(
                503,
                f"the server has {num_open} open requests and accepts at most {max_open} (server.max_waiting); "
                "try again later",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        placements = self.router.place(requests, loads, choices)
        # The choices of all requests of one replica get consecutive numbers.
        order = sorted(range(len(requests)), key=lambda index: placements[index].replica)
        firsts = [0] * len(requests)
        for position, index in enumerate(order):
            firsts[index] = self._next_number + position * choices
        self._next_number += len(requests) * choices
        group = RequestGroup(self.abort, [first + choice for first in firsts for choice in range(choices)])
        for index, (first, request, placement) in enumerate(zip(firsts, requests, placements, strict=True)):
            prompt = self._prompt(request, placement.replica, choices)
            for choice in range(choices):
                entry = OpenRequest(
                    group,
                    index * choices + choice,
                    prompt,
                    placement.replica,
                    placement.output_cost,
                    0,
                    request.arrival,
                )
                self._set_load(entry, placement.output_cost + (0 if choice else placement.prompt_cost))
                self._open[first + choice] = entry
            self.metrics.replicas[placement.replica].open_requests += choices
        for replica, indices in groupby(order, key=lambda index: placements[index].replica):
            for batch in _batches(requests, indices):
                self.links[replica].send(Add(firsts[batch[0]], tuple(requests[index] for index in batch), choices))
        if self.trace is not None:
            names = {"requests": [request.id for request in requests]}
            self.trace.add(EVENT_LOOP, "submit", begin or time.monotonic_ns(), time.monotonic_ns(), names)
        return group

    def abort(self, numbers: Iterable[int], reason: str, num_tokens: int = 0) -> None:
        """Abort requests in the engine and count `reason` for each; called by RequestGroup.

        A request ended by a stop string has finished, so it is observed; num_tokens: the tokens that it generated. All
        aborts of an iteration of the event loop are one message per replica.
        """
        for number in numbers:
            entry = self._open.get(number)
            if entry is not None:
                self._remove(number, entry)
                metrics = self.metrics.replicas[entry.replica]
                if reason == FINISH_STOP:
                    now = time.monotonic()
                    times = entry.times and attrs.evolve(entry.times, finished=now)
                    entry.finish(metrics, reason, times, num_tokens, now)
                else:
                    metrics.count_finished(reason)
                if not self._aborted:
                    asyncio.get_running_loop().call_soon(self._send_aborts)
                self._aborted.setdefault(entry.replica, []).append(number)

    def fail(self, error: ApiError, group: RequestGroup | None = None) -> None:
        """End all open requests, or those of `group`, with this error and abort them in the engine."""
        self._fail({entry.group for entry in self._open.values()} if group is None else {group}, error)

    def fail_requests(self, numbers: Iterable[int], error: ApiError) -> None:
        """End the groups of these requests with this error, and abort their other requests in the engine."""
        self._fail({self._open[number].group for number in numbers if number in self._open}, error)

    def mark_down(self, down: EngineDown) -> None:
        """Fail every group with a request on a replica whose engine process has exited."""
        self.links[down.replica].mark_down(down)
        self.control.fail(down.replica, down.reason)
        self._recorder.drop(down.replica)
        self.trace = self._recorder if self._recorder.active else None
        groups = {entry.group for entry in self._open.values() if entry.replica == down.replica}
        self._fail(groups, self._engine_failed(down))

    def write_later(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Call `write(data)` after all groups with new events have been notified; writes keep their order.

        A system call between two streams costs more than its own time: the processor's caches and branch predictors are
        cold for the Python code after the call. So all events are built first, then all are written.
        """
        if not self._writes:
            asyncio.get_running_loop().call_soon(self._write)
        self._writes.append((write, data))

    def close(self) -> None:
        """Close all links."""
        for link in self.links:
            link.close()
        self._context.destroy(linger=0)

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, {}
        for replica, numbers in aborted.items():
            if self.links[replica].down is None:
                self.links[replica].send(Abort(tuple(numbers)))

    def _write_all(self) -> None:
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except Exception:  # one connection's failure must not affect the others
                log.exception("a connection failed")

    def _prompt(self, request: Request, replica: int, choices: int) -> Prompt:
        """What the metrics observe of a request's prompt when its choices have finished."""
        started, num_tokens = self.links[replica].started, len(request.prompt)
        possible = started.max_len - num_tokens if started is not None else 0
        return Prompt(num_tokens, request.params.max_tokens or possible, choices, choices)

    def _loads(self) -> list[float | None]:
        """Load of each replica, tokens; None: send it no requests. Raises ApiError when all replicas are down."""
        up = [link.down is None for link in self.links]
        if not any(up):
            self.metrics.count_rejected("engine_failed")
            last = max((link.down for link in self.links if link.down), key=lambda down: down.since)
            raise self._engine_failed(last)
        # A replica that is stuck may recover: it is better than none.
        timeout = self._limits.health_timeout
        healthy = [link.fault(timeout) is None for link in self.links] if len(self.links) > 1 else up
        usable = healthy if any(healthy) else up
        return [load if use else None for load, use in zip(self.metrics_table.loads, usable, strict=True)]

    def _engine_failed(self, down: EngineDown) -> ApiError:
        """The error of requests on a replica that is down."""
        if all(link.down is not None for link in self.links):
            restarting = any(link.down.will_restart for link in self.links if link.down is not None)
            advice = "it is being restarted, so try again later" if restarting else "restart the server"
            message = f"the engine failed: {down.reason}; {advice}"
        else:
            message = f"replica {down.replica} of the engine failed: {down.reason}; other replicas are up, so try again"
        return ApiError(503, message, code="engine_failed")

    def _fail(self, groups: set[RequestGroup], error: ApiError) -> None:
        """End these groups with this error and abort their requests in the engine."""
        failed: dict[int, list[int]] = {}
        for number, entry in list(self._open.items()):
            if entry.group in groups:
                failed.setdefault(entry.replica, []).append(number)
                self._remove(number, entry)
        for replica, numbers in failed.items():
            self.metrics.replicas[replica].count_finished(FINISH_ERROR, len(numbers))
            if self.links[replica].down is None:
                self.links[replica].send(Abort(tuple(numbers)))
        for group in groups:
            group.fail(error)

    def _remove(self, number: int, entry: OpenRequest) -> None:
        del self._open[number]
        self.metrics.replicas[entry.replica].open_requests -= 1
        self._set_load(entry, 0)

    def _set_load(self, entry: OpenRequest, load: int) -> None:
        """Set a request's load on its replica, tokens."""
        self.metrics.replicas[entry.replica].load += load - entry.load
        entry.load = load

    def _notify_groups(self) -> None:
        """Notify the groups with new events, then write what they built."""
        groups, self._updated_groups = self._updated_groups, []
        if self.trace is None:
            self._build_events(groups)
            self._write()
            return
        self.traced("detokenize", self._build_events)(groups)
        self.traced("write", self._write)()
        if self._delivering_since:
            self.trace.add(EVENT_LOOP, "outputs", self._delivering_since, time.monotonic_ns())
            self._delivering_since = 0

    def traced(self, name: str, work: Callable[P, T]) -> Callable[P, T]:
        """`work`, recorded as a span of the trace; `work` itself while no trace is recorded."""
        return work if self.trace is None else self.trace.spanned(name, work)

    def _deliver(self, metrics: ReplicaMetrics, message: Outputs) -> None:
        """Put each output into its group and update `metrics`, which are those of the replica that sent `message`."""
        now = time.monotonic()
        if self.trace is not None and not self._delivering_since:
            self._delivering_since = time.monotonic_ns()
        requests, tokens, at = self._open, message.tokens, 0
        add_updated = self._updated_groups.append
        # Most requests got one token in the same earlier step: observe equal latencies together.
        num_equal, equal = 0, (now, 1)
        for number, count in zip(message.numbers, message.counts, strict=True):
            entry = requests.get(number)
            if entry is not None:  # else it was aborted meanwhile
                if (entry.last_token, count) != equal:
                    _observe_latency(metrics, now, *equal, num_equal)
                    num_equal, equal = 0, (entry.last_token, count)
                num_equal += 1
                entry.last_token = now
                if entry.group.put(entry.index, tokens[at : at + count], None):
                    add_updated(entry.group)
            at += count
        _observe_latency(metrics, now, *equal, num_equal)
        for packed in message.prompt_logprobs:
            entry = requests.get(packed.number)
            if entry is not None:
                entry.group.prompt_logprobs[entry.index] = packed.slices
        if message.control:
            self._take_control(message.control)
        for number, output in message.full:
            self._deliver_full(metrics, number, output, now)

    def _take_control(self, messages: Sequence[ControlAnswer | RecordSpans]) -> None:
        """Resolve the control calls that are answered, and start or stop recording spans."""
        self.control.resolve(one for one in messages if isinstance(one, ControlAnswer))
        for one in messages:
            if isinstance(one, RecordSpans):
                self._recorder.update(one)
        self.trace = self._recorder if self._recorder.active else None
        self._delivering_since = 0

    def _deliver_full(self, metrics: ReplicaMetrics, number: int, output: Output, now: float) -> None:
        entry = self._open.get(number)
        if entry is None:
            return
        if output.tokens:
            since = entry.last_token if entry.has_tokens else entry.arrival
            metrics.observe_tokens(now - since, len(output.tokens), not entry.has_tokens)
            if not entry.has_tokens:
                entry.times, entry.cached_tokens = output.times, output.cached_tokens
                metrics.count_prompt(entry.prompt.num_tokens, output.cached_tokens)
            entry.last_token, entry.has_tokens = now, True
            self._set_load(entry, entry.output_cost)
        if output.finish_reason is not None:
            self._remove(number, entry)
            entry.finish(metrics, output.finish_reason, output.times, output.num_tokens, now)
        if entry.group.put(entry.index, output.tokens, output):
            self._updated_groups.append(entry.group)


def _notify(groups: Iterable[RequestGroup]) -> None:
    """Notify groups, whose listeners build events."""
    for group in groups:
        group.notify()


def _observe_latency(metrics: ReplicaMetrics, now: float, last_token: float, count: int, num_requests: int) -> None:
    """Observe that `num_requests` requests got `count` tokens each, `now` after the latest ones at `last_token`."""
    if num_requests:
        metrics.inter_token_latency.observe((now - last_token) / count, count * num_requests)


def _batches(requests: Sequence[Request], indices: Iterable[int]) -> Iterator[list[int]]:
    """Group the indices of requests in order; a group ends once its prompts and predictions reach MAX_TOKENS."""
    batch: list[int] = []
    tokens = 0
    for index in indices:
        batch.append(index)
        tokens += len(requests[index].prompt) + len(requests[index].prediction)
        if tokens >= MAX_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch
