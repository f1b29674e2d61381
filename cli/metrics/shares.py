"""Shares of a step, of a request, and of HTTP, scheduling and device, from two scrapes of a server."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from engine.cli.metrics.scrape import Interval, Scrape

STEP = ("receive", "schedule", "submit", "wait", "commit", "send")
"""Phases of the engine process, in the order in which they follow each other; none overlaps another."""
RUNNER = ("prepare", "launch", "sample")
"""Phases of the runner: within submit where the engine's process runs the model, else in a worker, during wait."""
IDLE = "idle"
WHAT = {
    "receive": "receiving messages of the front ends; adding requests to the scheduler",
    "schedule": "planning the step",
    "submit": "giving the step to the executor; without workers, running it",
    "wait": "waiting for the result of the oldest step",
    "commit": "adding tokens to sequences; freeing blocks of finished requests",
    "send": "sending outputs to the front ends",
    IDLE: "no request to run, and what is not measured",
    "prepare": "building the batch on the device",
    "launch": "launching the kernels; on a CPU, computing",
    "sample": "sampling; on a CPU, computing",
    "http": "parsing HTTP, checking bodies, writing whole answers, the event loop",
    "tokenize": "chat templates and tokenizing",
    "route": "choosing the replica; sending the request",
    "deliver": "receiving the engine's messages",
    "detokenize": "turning tokens into text and events",
    "write": "writing events to the sockets",
    "queue": "waiting to be scheduled",
}
"""What each phase is."""


@frozen
class PhaseShare:
    """The time of one phase."""

    process: str
    phase: str
    seconds: float
    """Seconds in the whole interval."""
    share: float | None
    """Share of the time of all phases of the table; None for a part of another phase."""


@frozen
class Shares:
    """The three shares in which the time of a server is often divided, and the seconds of each."""

    http: float
    scheduling: float
    device: float

    @property
    def shares(self) -> Mapping[str, float]:
        """Each as a share of the three together."""
        seconds = {"HTTP": self.http, "scheduling": self.scheduling, "device": self.device}
        total = sum(seconds.values()) or 1.0
        return {name: value / total for name, value in seconds.items()}


def counts(interval: Interval) -> tuple[float, float, float]:
    """Steps, finished requests and generated tokens."""
    return (
        interval.total("engine_steps_total"),
        interval.total("engine_requests_finished_total"),
        interval.total("engine_generation_tokens_total"),
    )


def of_step(interval: Interval) -> list[PhaseShare]:
    """The phases of the engine processes' time, the idle time, and the runner's phases as parts of others."""
    seconds = interval.by("engine_phase_seconds_total", "phase")
    replicas = max(1, len(interval.after.of_name("engine_up")))
    whole = interval.seconds * replicas
    idle = max(0.0, whole - sum(seconds.get(phase, 0.0) for phase in STEP))
    found = [PhaseShare("engine", name, seconds[name], seconds[name] / whole) for name in STEP if name in seconds]
    found.append(PhaseShare("engine", IDLE, idle, idle / whole))
    runner = "worker" if _has_workers(interval) else "engine, in submit"
    return found + [PhaseShare(runner, name, seconds[name], None) for name in RUNNER if name in seconds]


def of_request(interval: Interval) -> list[PhaseShare]:
    """The CPU time of the front ends and the busy time of the engine by phase, and the time in the queue."""
    front_end = interval.by("engine_front_end_seconds_total", "phase")
    engine = {row.phase: row.seconds for row in of_step(interval) if row.share is not None and row.phase != IDLE}
    total = sum(front_end.values()) + sum(engine.values()) or 1.0
    found = [PhaseShare("front end", name, seconds, seconds / total) for name, seconds in front_end.items()]
    found += [PhaseShare("engine", name, seconds, seconds / total) for name, seconds in engine.items()]
    found.append(PhaseShare("engine", "queue", interval.total("engine_request_queue_time_seconds_sum"), None))
    return found


def three_shares(interval: Interval) -> Shares | None:
    """HTTP, scheduling and device; None if the time of the front ends is not known.

    HTTP: CPU time of the front ends, and the engine's phases receive and send. Scheduling: schedule, prepare, commit,
    and what submit takes besides the runner. Device: launch, sample and wait; with workers, wait less prepare.
    """
    front_end = sum(interval.by("engine_front_end_seconds_total", "phase").values())
    if not front_end:
        front_end = interval.total("process_cpu_seconds_total", process="front_end")
    if not front_end:
        return None
    seconds = dict.fromkeys((*STEP, *RUNNER), 0.0) | interval.by("engine_phase_seconds_total", "phase")
    runner = sum(seconds[name] for name in RUNNER)
    if _has_workers(interval):
        device = max(0.0, seconds["wait"] - seconds["prepare"])
        submit = seconds["submit"] + seconds["wait"] - device
    else:
        device = seconds["launch"] + seconds["sample"] + seconds["wait"]
        submit = max(0.0, seconds["submit"] - runner) + seconds["prepare"]
    return Shares(
        http=front_end + seconds["receive"] + seconds["send"],
        scheduling=seconds["schedule"] + submit + seconds["commit"],
        device=device,
    )


def _has_workers(interval: Interval) -> bool:
    """Whether the runner's phases are not part of submit.

    By all seconds since the start: a step that begins before an interval and ends in it counts for some of its phases.
    """
    since_start = Interval(Scrape(0.0, {}, {}), interval.after)
    seconds = since_start.by("engine_phase_seconds_total", "phase")
    return sum(seconds.get(name, 0.0) for name in RUNNER) > 1.05 * seconds.get("submit", 0.0)
