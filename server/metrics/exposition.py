"""Writes metrics in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from engine.core.types import HistogramCounts
from engine.server.metrics.definition import Sample, Series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write(series: Series, kind: str, text: str, bounds: Sequence[float], samples: Iterable[tuple[str, Sample]]) -> str:
    """One metric with all its samples; nothing if there are none.

    text: the help. bounds: of the histograms among the samples, of which those of `series` are written.
    samples: pairs of the labels before the metric's own, as `label_pairs` writes them, and the sample.
    """
    lines: list[str] = []
    for before, (values, value) in samples:
        own = label_pairs(zip(series.label_names, (series.values.get(one, one) for one in values), strict=True))
        labels = f"{before},{own}" if before and own else before or own
        if isinstance(value, HistogramCounts):
            lines += _buckets(series, labels, bounds, value)
        else:
            lines.append(f"{series.name}{{{labels}}} {float(value)!r}" if labels else f"{series.name} {float(value)!r}")
    if not lines:
        return ""
    head = f"# HELP {series.name} {_escape(text, quotes=False)}\n# TYPE {series.name} {kind}\n"
    return head + "\n".join(lines) + "\n"


def label_pairs(labels: Iterable[tuple[str, str]]) -> str:
    """Labels as they are written between braces."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels)


def _buckets(series: Series, labels: str, bounds: Sequence[float], histogram: HistogramCounts) -> list[str]:
    """The samples of one histogram."""
    name, before = series.name, f"{labels}," if labels else ""
    up_to = list(accumulate(histogram.counts)) or [0] * (len(bounds) + 1)
    counts = [(number(bound), up_to[bisect_left(bounds, bound)]) for bound in series.bounds]
    lines = [f'{name}_bucket{{{before}le="{bound}"}} {count}.0' for bound, count in (*counts, ("+Inf", up_to[-1]))]
    around = f"{{{labels}}}" if labels else ""
    return [*lines, f"{name}_count{around} {up_to[-1]}.0", f"{name}_sum{around} {float(histogram.sum)!r}"]


def number(value: float) -> str:
    """A bucket bound as Prometheus' clients in Go and Python write it, so that queries for one bucket find it."""
    text = repr(float(value))
    digits = text.find(".")
    if digits <= 6:
        return text
    mantissa = f"{text[0]}.{text[1:digits]}{text[digits + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{digits - 1:02}"


def _escape(text: str, *, quotes: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
