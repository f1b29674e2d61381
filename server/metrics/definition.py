"""What a metric is: name, type, labels, help, source, and the name that vLLM has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Literal, TypeVar

from attrs import frozen

from engine.core.types import HistogramCounts

Kind = Literal["counter", "gauge", "histogram"]
Sample = tuple[tuple[str, ...], float | HistogramCounts]
"""(values of the metric's own labels, number or histogram)."""
Source = TypeVar("Source")
"""What a metric is read from: a ReplicaReport, the sum of all rows of the metrics table, a process."""

PREFIX = "engine_"
VLLM_PREFIX = "vllm:"
VLLM_COMMON = {"replica": "engine"}
"""Our common label -> vLLM's."""


@frozen(kw_only=True)
class VllmName:
    """How vLLM exports the same metric."""

    name: str
    """Without prefix, and of a counter without _total."""
    labels: Mapping[str, str] = {}
    """Our label -> vLLM's, where they differ."""
    values: Mapping[str, str] = {}
    """Our value of a label -> vLLM's, where they differ."""
    bounds: tuple[float, ...] = ()
    """vLLM's bucket bounds, a subset of ours. Empty: the same."""
    zeros: tuple[str, ...] = ()
    """vLLM's values of the only label that stand for what never happens here: exported as 0."""


@frozen(kw_only=True)
class Metric(Generic[Source]):
    """One metric of /metrics."""

    name: str
    """Without the prefix engine_, and of a counter without _total. Empty: exported under vLLM's name alone."""
    kind: Kind
    help: str
    read: Callable[[Source], Iterable[Sample]]
    """The present samples; none for what does not exist, such as graphs on a CPU."""
    labels: tuple[str, ...] = ()
    """The metric's own labels; all have model_name, and those of a replica have replica."""
    bounds: tuple[float, ...] = ()
    """Bucket bounds of a histogram."""
    up_to_context: bool = False
    """Whether bounds above the maximum context length are left out."""
    general: bool = False
    """Whether the name is one that many programs use, and so has neither prefix nor model_name."""
    vllm: VllmName | None = None


@frozen(kw_only=True)
class Series:
    """A metric under one of its names."""

    name: str
    """As it is written, without the suffixes of a histogram's samples."""
    label_names: tuple[str, ...]
    values: Mapping[str, str]
    """Our value of a label -> the one to write, where they differ."""
    bounds: tuple[float, ...]
    """Bounds of the buckets to write, some of the metric's own."""
    common: Mapping[str, str] = {}
    """Name of a common label, model_name or replica -> the one to write, where they differ."""
    zeros: tuple[Sample, ...] = ()
    """Samples to add to those that the metric reads."""

    def common_labels(self, labels: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """The common labels, under the names that this series has for them."""
        return [(self.common.get(name, name), value) for name, value in labels]


def series(metric: Metric[Source], names: str, max_len: int) -> list[Series]:
    """The names under which a metric is exported.

    names: server.metrics_names. max_len: maximum context length, tokens. Under "vllm", a metric for which vLLM has no
    name keeps ours.
    """
    suffix = "_total" if metric.kind == "counter" else ""
    top = max_len if metric.up_to_context else float("inf")
    found = []
    if metric.name and (names != "vllm" or metric.vllm is None):
        prefix = "" if metric.general else PREFIX
        bounds = tuple(bound for bound in metric.bounds if bound <= top)
        found.append(Series(name=f"{prefix}{metric.name}{suffix}", label_names=metric.labels, values={}, bounds=bounds))
    if metric.vllm is not None and names != "engine":
        vllm = metric.vllm
        labels = tuple(vllm.labels.get(label, label) for label in metric.labels)
        bounds = tuple(bound for bound in vllm.bounds or metric.bounds if bound <= top)
        name = f"{VLLM_PREFIX}{vllm.name}{suffix}"
        zeros = tuple(by_label((value, 0) for value in vllm.zeros))
        found.append(
            Series(name=name, label_names=labels, values=vllm.values, bounds=bounds, common=VLLM_COMMON, zeros=zeros)
        )
    return found


def by_label(pairs: Iterable[tuple[str, float]]) -> list[Sample]:
    """The samples of a metric with one label of its own, from (value of the label, number) pairs."""
    return [((label,), value) for label, value in pairs]
