"""The metrics of speculative decoding: drafts that steps have verified, and those of them that were accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.types import SpeculationStats
from engine.server.metrics.definition import Metric, Sample, VllmName
from engine.server.metrics.reports import ReplicaReport


def _counter(
    name: str, text: str, read: Callable[[SpeculationStats], Iterable[Sample]], *labels: str, vllm: str = ""
) -> Metric[ReplicaReport]:
    """A counter that is exported if there is a speculator. vllm: vLLM's name."""

    def present(report: ReplicaReport) -> Iterable[Sample]:
        stats = report.engine.stats.speculation
        return [] if stats is None else read(stats)

    return Metric(
        name=name, kind="counter", help=text, labels=labels, read=present, vllm=VllmName(name=vllm) if vllm else None
    )


def _by_position(counts: Iterable[int]) -> list[Sample]:
    return [((str(position),), count) for position, count in enumerate(counts)]


SPECULATION_METRICS: tuple[Metric[ReplicaReport], ...] = (
    _counter(
        "speculation_proposals",
        "Proposals of which a step verified draft tokens: the request gains one token more than were accepted.",
        lambda stats: [((), stats.verified[0])],
        vllm="spec_decode_num_drafts",
    ),
    _counter(
        "speculation_draft_tokens",
        "Draft tokens verified.",
        lambda stats: [((), sum(stats.verified))],
        vllm="spec_decode_num_draft_tokens",
    ),
    _counter(
        "speculation_accepted_tokens",
        "Draft tokens accepted. Each saved a request one decode.",
        lambda stats: [((), sum(stats.accepted))],
        vllm="spec_decode_num_accepted_tokens",
    ),
    _counter(
        "speculation_draft_tokens_by_position",
        "Draft tokens verified, by their position in the proposal, from 0.",
        lambda stats: _by_position(stats.verified),
        "position",
    ),
    _counter(
        "speculation_accepted_tokens_by_position",
        "Draft tokens accepted, by their position in the proposal, from 0.",
        lambda stats: _by_position(stats.accepted),
        "position",
        vllm="spec_decode_num_accepted_tokens_per_pos",
    ),
    _counter(
        "speculator_faults",
        "Calls in which the speculator failed or gave an invalid answer, so that there was no proposal.",
        lambda stats: [((), stats.faults)],
    ),
)
"""Nothing is exported without a speculator."""
