"""Hand-made answers of /metrics for the tests of `engine top`."""

from __future__ import annotations

from collections.abc import Mapping

from engine.cli.metrics.scrape import Interval, Scrape

PHASES = {"receive": 0.1, "schedule": 0.1, "submit": 1.2, "wait": 0.2, "commit": 0.1, "send": 0.1}
RUNNER = {"prepare": 0.2, "launch": 0.8, "sample": 0.1}


def metrics(
    scale: float = 1.0,
    *,
    replicas: int = 1,
    restarts: int = 0,
    started: float = 1000.0,
    peaks: bool = True,
    optional: bool = True,
    prefix: str = "engine_",
    more: Mapping[str, float] = {},
) -> str:
    """What each of some replicas has done `scale` times: 10 requests of 80 tokens in 100 steps of 20 ms.

    optional: whether what a setting or a device turns on is there. prefix: of the metrics that vLLM has too.
    """
    lines: list[str] = []

    def add(name: str, value: float, **labels: object) -> None:
        pairs = {"model_name": "tiny"} | labels if name.startswith(("engine_", "vllm:")) else labels
        text = ",".join(f'{label}="{one}"' for label, one in pairs.items())
        lines.append(f"{name}{{{text}}} {float(value)!r}")

    for number in range(replicas):
        own = {"replica": number}
        add("engine_up", 1, **own)
        add("engine_restarts_total", restarts, **own)
        add(f"{prefix}num_requests_running", 3, **own)
        add(f"{prefix}num_requests_waiting", 2, **own)
        add("engine_num_requests_waiting_by_reason", 1, **own, reason="deferred")
        add("engine_requests_finished_total", 8 * scale, **own, finish_reason="stop")
        add("engine_requests_finished_total", 2 * scale, **own, finish_reason="length")
        for bound, first, between in ((0.01, 0, 400), (0.02, 5, 800), (0.04, 10, 800), ("+Inf", 10, 800)):
            add("engine_time_to_first_token_seconds_bucket", first * scale, **own, le=bound)
            add("engine_inter_token_latency_seconds_bucket", between * scale, **own, le=bound)
        add("engine_prompt_tokens_total", 1000 * scale, **own)
        add("engine_prompt_tokens_by_source_total", 600 * scale, **own, source="cached")
        add("engine_generation_tokens_total", 800 * scale, **own)
        for state, blocks in (("used", 30), ("cached", 20), ("free", 50)):
            add("engine_kv_blocks", blocks, **own, state=state)
        add("engine_prefix_cache_queries_total", 1600 * scale, **own)
        add("engine_prefix_cache_hits_total", 600 * scale, **own)
        add("engine_num_preemptions_total", 4 * scale, **own)
        add("engine_steps_total", 100 * scale, **own)
        add("engine_iteration_tokens_count", 100 * scale, **own)
        add("engine_iteration_tokens_sum", 1800 * scale, **own)
        for phase, seconds in (PHASES | RUNNER).items():
            add("engine_phase_seconds_total", seconds * scale, **own, phase=phase)
        add("engine_gc_seconds_count", 4 * scale, **own, process="engine", generation=0)
        add("engine_gc_seconds_sum", 0.02 * scale, **own, process="engine", generation=0)
        if optional:
            add("engine_kv_block_sample", 0.1, **own)
            add("engine_kv_block_idle_before_evict_seconds_count", 5 * scale, **own)
            add("engine_kv_fragmentation", 0.05 * (number + 1), **own, reason="unfilled")
            for kind, steps in (("decode", 90), ("prefill", 10)):
                add("engine_steps_by_kind_total", steps * scale, **own, kind=kind)
                add("engine_step_seconds_total", 0.01 * steps * scale, **own, kind=kind)
                add("engine_model_bytes_total", 5e9 * steps * scale, **own, kind=kind, what="weights")
                add("engine_model_flops_total", 2e12 * steps * scale, **own, kind=kind)
                if peaks:
                    add("engine_step_floor_seconds_total", 0.005 * steps * scale, **own, kind=kind)
            if peaks:
                add("engine_peak_bytes_per_second", 1e12, **own)
                add("engine_peak_flops_per_second", 1e15, **own)
    add("engine_connections", 7)
    add("engine_admission_rejections_total", 6 * scale, reason="overloaded")
    add("engine_front_end_gc_seconds_count", 2 * scale, generation=0)
    add("engine_front_end_gc_seconds_sum", 0.001 * scale, generation=0)
    for process, number, cpu in (("supervisor", "0", 0.02), ("front_end", "0", 1.0), ("engine", "0", 1.8)):
        add("process_cpu_seconds_total", cpu * scale, process=process, number=number)
        add("process_resident_memory_bytes", 2**28, process=process, number=number)
        add("process_threads", 5, process=process, number=number)
        add("process_open_fds", 20, process=process, number=number)
        add("process_max_fds", 1024, process=process, number=number)
        add("process_start_time_seconds", started, process=process, number=number)
    lines += [f"{name} {value}" for name, value in more.items()]
    return "\n".join(lines) + "\n"


def two_seconds(before: str = "", after: str = "") -> Interval:
    """2 s between two answers; by default, in which the server did once what it had done before."""
    return Interval(Scrape.of(before or metrics(), {}, 50.0), Scrape.of(after or metrics(2.0), {}, 52.0))
