"""Computes the figures of an interval from two scrapes of a server's /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.cli.metrics.scrape import Interval
from engine.cli.metrics.shares import of_step, three_shares
from engine.cli.top.figures import ALL, Cache, Collections, Figures, Latency, Load, ProcessFigures, Roofline


def figures(interval: Interval) -> Figures:
    """The figures of an interval between two scrapes of one server."""
    after = interval.after
    names = after.label_values("engine_up", "replica")
    replicas = [_load(interval, name) for name in names]
    started = after.values("process_start_time_seconds", process="supervisor")
    shares = three_shares(interval)
    return Figures(
        seconds=interval.seconds,
        model=next(iter(after.label_values("engine_up", "model_name")), ""),
        total=_load(interval, None),
        replicas=replicas,
        declined=interval.total("engine_admission_rejections_total") / interval.seconds,
        connections=int(after.sum("engine_connections")),
        phases=of_step(interval),
        shares=None if shares is None else shares.shares,
        roofline=_rooflines(interval),
        processes=_processes(interval),
        collections=_collections(interval),
        started=started[0] if started else None,
        events=_events(interval, replicas),
    )


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """A quantile of a histogram, as Prometheus' histogram_quantile estimates it; None if nothing was counted.

    counts: upper bound of each bucket -> values up to that bound; one bound is infinite. Within a bucket, values are
    taken to be spread evenly; above the last finite bound, the result is that bound.
    """
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound in bounds:
        here = counts[bound]
        if here >= rank and here > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (here - below)
        lower, below = bound, max(below, here)
    return lower


def _latency(interval: Interval, name: str, labels: Mapping[str, str]) -> Latency | None:
    counts = {float(bound): grown for bound, grown in interval.by(f"{name}_bucket", "le", **labels).items()}
    p50, p95 = quantile(counts, 0.5), quantile(counts, 0.95)
    if p50 is None or p95 is None:
        return None
    return Latency(count=round(counts[float("inf")]), p50=p50, p95=p95)


def _load(interval: Interval, replica: str | None) -> Load:
    labels = {} if replica is None else {"replica": replica}
    after, seconds = interval.after, interval.seconds

    def rate(name: str, **more: str) -> float:
        return interval.total(name, **labels, **more) / seconds

    finished = interval.by("engine_requests_finished_total", "finish_reason", **labels)
    return Load(
        replica=replica,
        up=after.sum("engine_up", **labels) > 0,
        running=int(after.sum("engine_num_requests_running", **labels)),
        waiting=int(after.sum("engine_num_requests_waiting", **labels)),
        deferred=int(after.sum("engine_num_requests_waiting_by_reason", reason="deferred", **labels)),
        finished={reason: count / seconds for reason, count in finished.items()},
        prompt_tokens=rate("engine_prompt_tokens_total"),
        cached_tokens=rate("engine_prompt_tokens_by_source_total", source="cached"),
        generated_tokens=rate("engine_generation_tokens_total"),
        preemptions=rate("engine_num_preemptions_total"),
        first_token=_latency(interval, "engine_time_to_first_token_seconds", labels),
        between_tokens=_latency(interval, "engine_inter_token_latency_seconds", labels),
        cache=_cache(interval, labels),
        steps=rate("engine_steps_total"),
        tokens_per_step=_ratio(rate("engine_iteration_tokens_sum"), rate("engine_iteration_tokens_count")),
        floor_share=_ratio(_floor(interval, labels), interval.total("engine_step_seconds_total", **labels)),
    )


def _cache(interval: Interval, labels: Mapping[str, str]) -> Cache:
    after = interval.after
    sample = max(after.values("engine_kv_block_sample", **labels), default=0.0)
    sampled = interval.total("engine_kv_block_idle_before_evict_seconds_count", **labels)
    fragmentation = "engine_kv_fragmentation"
    return Cache(
        used=int(after.sum("engine_kv_blocks", state="used", **labels)),
        cached=int(after.sum("engine_kv_blocks", state="cached", **labels)),
        free=int(after.sum("engine_kv_blocks", state="free", **labels)),
        hit_rate=_ratio(
            interval.total("engine_prefix_cache_hits_total", **labels),
            interval.total("engine_prefix_cache_queries_total", **labels),
        ),
        evictions=sampled / sample / interval.seconds if sample else None,
        unused={
            reason: max(after.values(fragmentation, reason=reason, **labels), default=0.0)
            for reason in after.label_values(fragmentation, "reason")
        },
    )


def _floor(interval: Interval, labels: Mapping[str, str]) -> float | None:
    """Growth of the minimum seconds of the steps at the device's peaks; None if unknown."""
    name = "engine_step_floor_seconds_total"
    return interval.total(name, **labels) if interval.after.values(name, **labels) else None


def _rooflines(interval: Interval) -> list[Roofline]:
    """The rooflines of the kinds of which there were steps, and of all steps."""
    kinds = [kind for kind, steps in interval.by("engine_steps_by_kind_total", "kind").items() if steps]
    found = [_roofline(interval, kind, {"kind": kind}) for kind in kinds]
    return [*found, _roofline(interval, ALL, {})] if found else []


def _roofline(interval: Interval, kind: str, labels: Mapping[str, str]) -> Roofline:
    after = interval.after
    replicas = after.label_values("engine_up", "replica")
    steps = interval.total("engine_steps_by_kind_total", **labels)
    busy = interval.by("engine_step_seconds_total", "replica", **labels)
    divisor = busy if labels else dict.fromkeys(replicas, interval.seconds)
    device_seconds = sum(divisor.values())
    floor = _floor(interval, labels)

    def share(counter: str, peak: str) -> float | None:
        """The growth of a counter as a share of what the devices' peaks allow in the time."""
        possible = [
            seconds * value for replica, seconds in divisor.items() for value in after.values(peak, replica=replica)
        ]
        return _ratio(interval.total(counter, **labels), sum(possible))

    return Roofline(
        kind=kind,
        steps=steps / interval.seconds,
        step_seconds=sum(busy.values()) / steps,
        floor_seconds=None if floor is None else floor / steps,
        floor_share=_ratio(floor, sum(busy.values())),
        bytes_per_second=_ratio(interval.total("engine_model_bytes_total", **labels), device_seconds) or 0.0,
        flops_per_second=_ratio(interval.total("engine_model_flops_total", **labels), device_seconds) or 0.0,
        bandwidth_share=share("engine_model_bytes_total", "engine_peak_bytes_per_second"),
        flops_share=share("engine_model_flops_total", "engine_peak_flops_per_second"),
    )


def _processes(interval: Interval) -> list[ProcessFigures]:
    name, after, known = "process_cpu_seconds_total", interval.after, interval.before
    found = []
    for process in after.label_values(name, "process"):
        for number, cpu in interval.by(name, "number", process=process).items():
            labels = {"process": process, "number": number}
            found.append(
                ProcessFigures(
                    role=process,
                    number=number,
                    cores=cpu / interval.seconds if known.values(name, **labels) else None,
                    resident_bytes=int(after.sum("process_resident_memory_bytes", **labels)),
                    threads=int(after.sum("process_threads", **labels)),
                    descriptors=int(after.sum("process_open_fds", **labels)),
                    max_descriptors=int(after.sum("process_max_fds", **labels)),
                )
            )
    return found


def _collections(interval: Interval) -> list[Collections]:
    """The garbage collections of each kind of process that reports them."""
    front_end, engine = "engine_front_end_gc_seconds", "engine_gc_seconds"
    sources: list[tuple[str, str, dict[str, str]]] = []
    if interval.after.of_name(f"{front_end}_count"):
        sources.append(("front_end", front_end, {}))
    for process in interval.after.label_values(f"{engine}_count", "process"):
        sources.append((process, engine, {"process": process}))
    found = []
    for process, name, labels in sources:
        count, pause = interval.total(f"{name}_count", **labels), interval.total(f"{name}_sum", **labels)
        found.append(
            Collections(
                process=process,
                per_second=count / interval.seconds,
                mean_pause=_ratio(pause, count) or 0.0,
                share=pause / interval.seconds,
            )
        )
    return found


def _events(interval: Interval, replicas: Sequence[Load]) -> list[str]:
    """A sentence for each restart, and for each replica that is down."""
    restarted = interval.restarted_replicas
    found = [
        f"the engine process of replica {name} was restarted in this interval: what it did before is missing in part"
        for name in restarted
    ]
    found += [f"the engine process of replica {load.replica} is down" for load in replicas if not load.up]
    front_ends = [number for process, number in interval.replaced_processes if process == "front_end"]
    return found + [f"front end {number} was restarted in this interval" for number in front_ends]


def _ratio(part: float | None, whole: float) -> float | None:
    """Part of a whole; None if either is unknown or the whole is 0."""
    return None if part is None or not whole else part / whole
