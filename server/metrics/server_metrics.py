"""The metrics of the server, of HTTP and of processes; those of each replica are in metric_list.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.core.gc_pauses import GC_BOUNDS
from engine.server.metrics import buckets
from engine.server.metrics.definition import Kind, Metric, Sample, VllmName, by_label
from engine.server.metrics.gc_metrics import pause_samples
from engine.server.metrics.processes import Process
from engine.server.metrics.reports import ServerReport
from engine.server.shared.metrics_table import FRONT_END_PHASES


def _http_requests(server: ServerReport) -> Iterator[Sample]:
    for slot, (method, path) in enumerate(server.routes):
        counts = server.counts.http.statuses(slot)
        if any(counts.values()):  # a class without requests too, since `rate` misses the first of a new series
            for status, count in counts.items():
                yield (path, method, status), count


def _http_durations(server: ServerReport) -> Iterator[Sample]:
    for slot, (method, path) in enumerate(server.routes):
        durations = server.counts.http.durations(slot)
        if any(durations.counts):
            yield (path, method), durations


def _front_end_seconds(server: ServerReport) -> list[Sample]:
    cells = server.counts.phase_cells
    return by_label(zip(FRONT_END_PHASES, cells, strict=True)) if any(cells) else []


SERVER_METRICS: tuple[Metric[ServerReport], ...] = (
    Metric(
        name="connections",
        kind="gauge",
        help="Open client connections.",
        read=lambda server: [((), server.counts.connections)],
    ),
    Metric(
        name="connections_dropped",
        kind="counter",
        help="Connections that the server closed early, by reason.",
        labels=("reason",),
        read=lambda server: by_label(server.counts.dropped.items()),
    ),
    Metric(
        name="traces_lost",
        kind="counter",
        help="Requests whose traces could not be sent.",
        read=lambda server: [((), server.counts.lost_traces)],
    ),
    Metric(
        name="front_end_seconds",
        kind="counter",
        help="CPU time of the front ends by phase, with server.phase_times.",
        labels=("phase",),
        read=_front_end_seconds,
    ),
    Metric(
        name="front_end_gc_seconds",
        kind="histogram",
        help="Pauses of garbage collections in the front ends.",
        labels=("generation",),
        bounds=GC_BOUNDS,
        read=lambda server: pause_samples(server.counts.gc_pauses.counts()),
    ),
    Metric(
        name="admission_rejections",
        kind="counter",
        help="Requests declined for the time being, by the code of the error.",
        labels=("reason",),
        read=lambda server: by_label(server.counts.rejected.items()),
    ),
    Metric(
        name="",
        kind="counter",
        help="Requests declined because server.max_waiting requests were in the engine; tokens are not limited.",
        labels=("reason",),
        read=lambda server: by_label(
            [("max_num_queued_reqs", server.counts.rejected["overloaded"]), ("max_num_queued_tokens", 0)]
        ),
        vllm=VllmName(name="admission_rejections"),
    ),
)
"""Metrics of the whole server, with the label model_name."""

HTTP_METRICS: tuple[Metric[ServerReport], ...] = (
    Metric(
        name="http_requests",
        kind="counter",
        help="HTTP requests by route, method and class of status; not those of /metrics, /health, /ping and /version.",
        labels=("handler", "method", "status"),
        general=True,
        read=_http_requests,
    ),
    Metric(
        name="http_request_duration_seconds",
        kind="histogram",
        help="From the head of an HTTP request to the end of its response.",
        labels=("handler", "method"),
        bounds=buckets.HTTP_SECONDS,
        general=True,
        read=_http_durations,
    ),
)
"""HTTP, under the names and labels that prometheus-fastapi-instrumentator has, as vLLM exports them."""


def _of_process(kind: Kind, name: str, help_text: str, value: Callable[[Process], float]) -> Metric[Process]:
    return Metric(name=name, kind=kind, help=help_text, general=True, read=lambda process: [((), value(process))])


PROCESS_METRICS: tuple[Metric[Process], ...] = (
    _of_process("counter", "process_cpu_seconds", "User and system time.", lambda process: process.cpu_seconds),
    _of_process("gauge", "process_resident_memory_bytes", "Resident memory.", lambda process: process.resident_bytes),
    _of_process("gauge", "process_virtual_memory_bytes", "Virtual memory.", lambda process: process.virtual_bytes),
    _of_process("gauge", "process_open_fds", "Open file descriptors.", lambda process: process.descriptors),
    _of_process("gauge", "process_max_fds", "Limit of open file descriptors.", lambda process: process.max_descriptors),
    _of_process("gauge", "process_threads", "Threads.", lambda process: process.threads),
    _of_process(
        "gauge", "process_start_time_seconds", "When the process started, Unix time.", lambda process: process.started
    ),
)
"""The server's processes, with the labels process (supervisor, front_end, engine or worker) and number."""
