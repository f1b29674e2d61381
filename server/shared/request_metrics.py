"""What a front end counts in its row of the metrics table: HTTP requests, and engine requests to each replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from engine.core.histogram import Histogram, num_cells
from engine.core.types import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FinishReason,
    HistogramCounts,
    RequestTimes,
)
from engine.server.metrics import buckets

FINISH_REASONS: tuple[FinishReason, ...] = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR)

TOKEN_SOURCES = ("computed", "cached")
"""Where the keys and values of prompt tokens come from."""

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": buckets.FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": buckets.TOKEN_SECONDS,
    "request_time_per_output_token_seconds": buckets.TOKEN_SECONDS,
    "e2e_request_latency_seconds": buckets.REQUEST_SECONDS,
    "request_queue_time_seconds": buckets.REQUEST_SECONDS,
    "request_prefill_time_seconds": buckets.REQUEST_SECONDS,
    "request_decode_time_seconds": buckets.REQUEST_SECONDS,
    "request_inference_time_seconds": buckets.REQUEST_SECONDS,
    "request_prompt_tokens": buckets.NUM_TOKENS,
    "request_prefill_kv_computed_tokens": buckets.NUM_TOKENS,
    "request_generation_tokens": buckets.NUM_TOKENS,
    "request_params_max_tokens": buckets.NUM_TOKENS,
    "request_max_num_generation_tokens": buckets.NUM_TOKENS,
    "request_params_n": buckets.NUM_CHOICES,
}
"""Name of each histogram of requests -> its bucket bounds."""

LOAD, OPEN_REQUESTS, NUM_SINGLE_OF_REPLICA = range(3)
"""Cells of a replica's part that hold one number, and their number."""


HTTP_SLOTS = 64
"""Maximum number of pairs of method and route that are counted separately."""
STATUSES = ("2xx", "3xx", "4xx", "5xx")
"""Classes of HTTP status."""


class HttpMetrics:
    """HTTP requests and their durations, by slots that stand for pairs of method and route."""

    _SLOT = len(STATUSES) + num_cells(buckets.HTTP_SECONDS)
    SIZE = HTTP_SLOTS * _SLOT

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: `SIZE` numbers."""
        at = Cells(cells, 0)
        self._slots = [
            (at.take(len(STATUSES)), Histogram(buckets.HTTP_SECONDS, at.take(num_cells(buckets.HTTP_SECONDS))))
            for _ in range(HTTP_SLOTS)
        ]

    def observe(self, slot: int, status: int, seconds: float) -> None:
        """Count a request; status: of the response."""
        counts, durations = self._slots[slot]
        counts[max(2, min(5, status // 100)) - 2] += 1
        durations.observe(seconds)

    def statuses(self, slot: int) -> dict[str, int]:
        """Number of requests by class of status."""
        return by_name(STATUSES, self._slots[slot][0])

    def durations(self, slot: int) -> HistogramCounts:
        """Seconds from the head of each request to the end of its response."""
        return self._slots[slot][1].snapshot()


@frozen(kw_only=True)
class FinishedRequest:
    """What is observed of a request that has finished, one choice of a prompt."""

    reason: str
    """One of FINISH_REASONS."""
    times: RequestTimes | None
    """None if no step has computed anything for the request."""
    seconds: float
    """From arrival to finish."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""
    generation_tokens: int
    max_tokens: int
    """Maximum tokens that the request could generate."""


class ReplicaMetrics:
    """What one front end counts of the requests it sent to one replica.

    The engine's own numbers come as EngineStats from the engine processes.
    """

    SIZE = NUM_SINGLE_OF_REPLICA + len(FINISH_REASONS) + len(TOKEN_SOURCES) + sum(map(num_cells, HISTOGRAMS.values()))
    """Numbers in a replica's part."""

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: `SIZE` numbers."""
        self._cells = cells
        at = Cells(cells, NUM_SINGLE_OF_REPLICA)
        self._finished = at.take(len(FINISH_REASONS))
        self._prompt_tokens = at.take(len(TOKEN_SOURCES))
        self.histograms = {name: Histogram(bounds, at.take(num_cells(bounds))) for name, bounds in HISTOGRAMS.items()}
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]

    @property
    def load(self) -> float:
        """This front end's load on the replica, tokens (server/front_end/routing.py)."""
        return self._cells[LOAD]

    @load.setter
    def load(self, tokens: float) -> None:
        self._cells[LOAD] = tokens

    @property
    def open_requests(self) -> int:
        """Number of requests sent to the replica that have not ended."""
        return int(self._cells[OPEN_REQUESTS])

    @open_requests.setter
    def open_requests(self, count: int) -> None:
        self._cells[OPEN_REQUESTS] = count

    @property
    def finished(self) -> dict[str, int]:
        """Number of ended requests by finish reason."""
        return by_name(FINISH_REASONS, self._finished)

    def count_finished(self, reason: str, count: int = 1) -> None:
        """Count ended requests; reason: one of FINISH_REASONS."""
        self._finished[FINISH_REASONS.index(reason)] += count

    def observe_tokens(self, seconds: float, count: int, first: bool) -> None:
        """Observe `count` tokens of a request that came `seconds` after its previous ones; first: after its arrival."""
        if first:
            self.histograms["time_to_first_token_seconds"].observe(seconds)
        else:
            self.inter_token_latency.observe(seconds / count, count)

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens of requests that got their first tokens, by source."""
        return by_name(TOKEN_SOURCES, self._prompt_tokens)

    def count_prompt(self, tokens: int, cached: int) -> None:
        """Count the prompt of a request that got its first token; cached: tokens found in the prefix cache."""
        self._prompt_tokens[0] += tokens - cached
        self._prompt_tokens[1] += cached

    def observe_finish(self, request: FinishedRequest) -> None:
        """Count a request that has finished; costs about 7 us."""
        self.count_finished(request.reason)
        histograms = self.histograms
        histograms["e2e_request_latency_seconds"].observe(request.seconds)
        times, generated = request.times, request.generation_tokens
        if times is None:
            return
        decode = max(0.0, times.finished - times.first_token)
        histograms["request_queue_time_seconds"].observe(max(0.0, times.scheduled - times.arrival))
        histograms["request_prefill_time_seconds"].observe(times.first_token - times.scheduled)
        histograms["request_decode_time_seconds"].observe(decode)
        histograms["request_inference_time_seconds"].observe(times.finished - times.scheduled)
        if generated > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode / (generated - 1))
        histograms["request_prompt_tokens"].observe(request.prompt_tokens)
        histograms["request_prefill_kv_computed_tokens"].observe(request.prompt_tokens - request.cached_tokens)
        histograms["request_generation_tokens"].observe(generated)
        histograms["request_params_max_tokens"].observe(request.max_tokens)

    def observe_prompt(self, choices: int, most_tokens: int) -> None:
        """Count a prompt whose choices have all finished; most_tokens: tokens of the longest choice."""
        self.histograms["request_params_n"].observe(choices)
        self.histograms["request_max_num_generation_tokens"].observe(most_tokens)

    def abort_open_requests(self) -> None:
        """Count the open requests as aborted."""
        self.count_finished(FINISH_ABORT, self.open_requests)
        self.open_requests = 0
        self.load = 0.0


class Cells:
    """Divides a row into parts, from a position on."""

    def __init__(self, cells: memoryview[float], start: int) -> None:
        self._cells = cells
        self._at = start

    def take(self, count: int) -> memoryview[float]:
        """The next `count` numbers."""
        self._at += count
        return self._cells[self._at - count : self._at]

    def parts(self, size: int) -> Iterator[memoryview[float]]:
        """All that is left, in parts of `size` numbers."""
        while self._at < len(self._cells):
            yield self.take(size)


def by_name(names: Sequence[str], cells: memoryview[float]) -> dict[str, int]:
    """Counts by name."""
    return {name: int(count) for name, count in zip(names, cells, strict=True)}
