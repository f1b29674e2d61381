"""The figures that `engine top` shows of an interval: plain data, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from engine.cli.metrics.shares import PhaseShare

ALL = "all"
"""Kind that stands for the steps of all kinds."""


@frozen(kw_only=True)
class Latency:
    """Quantiles of the times that ended in the interval, seconds."""

    count: int
    p50: float
    p95: float


@frozen(kw_only=True)
class Cache:
    """The KV cache of one replica, or of all."""

    used: int
    """Blocks."""
    cached: int
    """Blocks without a user, kept for prefixes that may come again."""
    free: int
    hit_rate: float | None
    """Share of the prompt tokens looked up in the interval that was found; None if none were looked up."""
    evictions: float | None
    """Blocks evicted per second, estimated from the sampled ones; None if that is not measured."""
    unused: Mapping[str, float]
    """Reason -> share of the token slots that is taken but unused, the largest of the replicas; empty if that is not
    measured."""

    @property
    def total(self) -> int:
        """Number of blocks."""
        return self.used + self.cached + self.free


@frozen(kw_only=True)
class Load:
    """Requests and tokens of one replica, or of all."""

    replica: str | None
    """None: all."""
    up: bool
    """Whether the engine process accepts requests; of all replicas: whether any process does."""
    running: int
    waiting: int
    deferred: int
    """The waiting requests whose grammar is not compiled yet."""
    finished: Mapping[str, float]
    """Finish reason -> requests per second."""
    prompt_tokens: float
    """Prompt tokens computed per second; those computed again after a preemption count again."""
    cached_tokens: float
    """Prompt tokens found in the prefix cache, per second, of requests that got their first token."""
    generated_tokens: float
    """Generated tokens per second."""
    preemptions: float
    """Preemptions per second."""
    first_token: Latency | None
    """Time to first token; None if no request got its first token."""
    between_tokens: Latency | None
    """None if no request got another token."""
    cache: Cache
    steps: float
    """Steps per second."""
    tokens_per_step: float | None
    floor_share: float | None
    """Share of the steps' time that the device needs at its peaks; None if unknown."""


@frozen(kw_only=True)
class Roofline:
    """The steps of one kind, or of all kinds, on one device of each replica."""

    kind: str
    """prefill, decode, mixed, or ALL."""
    steps: float
    """Steps per second."""
    step_seconds: float
    """Mean duration of a step."""
    floor_seconds: float | None
    """Mean minimum time of a step at the device's peaks; None if these are unknown."""
    floor_share: float | None
    """Share of a step's time that the device needs at its peaks."""
    bytes_per_second: float
    """Of one kind: per second of its steps. Of ALL: per second of the interval and replica. So are the fields below."""
    flops_per_second: float
    bandwidth_share: float | None
    """Share of the peak; None if the peak is unknown."""
    flops_share: float | None


@frozen(kw_only=True)
class ProcessFigures:
    """One process of the server."""

    role: str
    """supervisor, front_end, engine, or worker, which is a rank."""
    number: str
    """Number of a front end; of an engine, that of its replica; of a worker, those of replica and rank, as 0.1."""
    cores: float | None
    """CPU seconds per second; None for a process that is new."""
    resident_bytes: int
    threads: int
    descriptors: int
    max_descriptors: int


@frozen(kw_only=True)
class Collections:
    """Garbage collections of a kind of process, all of that kind together."""

    process: str
    """front_end, engine, or worker: rank 0 of each replica."""
    per_second: float
    mean_pause: float
    """0 if there were no collections."""
    share: float
    """Share of the interval spent in pauses, summed over the processes."""


@frozen(kw_only=True)
class Figures:
    """What a server did in an interval, and its state at the end."""

    seconds: float
    """Length of the interval."""
    model: str
    total: Load
    replicas: Sequence[Load]
    declined: float
    """Requests declined by admission control, per second."""
    connections: int
    phases: Sequence[PhaseShare]
    """Phases of a step, all replicas together; seconds and shares are of the interval."""
    shares: Mapping[str, float] | None
    """HTTP, scheduling and device, of their sum; None if the time of the front ends is unknown."""
    roofline: Sequence[Roofline]
    """Empty if the server does not measure it; ALL last."""
    processes: Sequence[ProcessFigures]
    collections: Sequence[Collections]
    started: float | None
    """time.time() of the server's start; None if unknown."""
    events: Sequence[str]
    """A sentence for each process restarted in the interval, and for each replica that is down."""
