"""Results of one level of load on a server: answers, errors, rates and latencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs
from attrs import frozen

from engine.cli.bench.client import Answered
from engine.cli.bench.load import say
from engine.cli.bench.report import Row, percent
from engine.cli.tables import print_table


@frozen(kw_only=True)
class Spread:
    """Mean and percentiles of a latency, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Statistics of measured seconds; all zero for no measurement."""
        ordered = sorted(seconds) or [0.0]
        mean = sum(ordered) / len(ordered)
        return cls(mean=mean * 1e3, **{f"p{part}": percentile(ordered, part / 100) * 1e3 for part in (50, 90, 99)})


@frozen(kw_only=True)
class Level:
    """Results of a server under one level of load."""

    name: str
    """The level, as tables show it: "concurrency 64" or "10 requests/s"."""
    answers: tuple[Answered, ...]
    seconds: float
    """Time from the first request sent to the last token."""
    input_len: int
    cores: float | None
    """Average CPU cores used by the processes of the server; None: unknown."""
    load_cores: float
    """Average CPU cores used by the busiest load process; near 1, the load generator limits the result."""
    good: int | None
    """Requests that met the service level objective; None: no objective."""
    share: float | None = None
    """Share of the roofline."""

    @property
    def served(self) -> list[Answered]:
        """The requests that succeeded."""
        return [one for one in self.answers if not one.error]

    @property
    def errors(self) -> Counter[str]:
        """Number of requests per error."""
        return Counter(one.error for one in self.answers if one.error)

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return sum(one.tokens for one in self.served) / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return sum(one.tokens + self.input_len for one in self.served) / self.seconds

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return len(self.served) / self.seconds

    @property
    def ttft(self) -> Spread:
        """Time to the first token."""
        return Spread.of([one.ttft for one in self.served])

    @property
    def tpot(self) -> Spread:
        """Time per output token after the first, one value per request."""
        return Spread.of([tpot for one in self.served if (tpot := one.tpot) is not None])

    @property
    def itl(self) -> Spread:
        """Inter-token latency: time between two events."""
        return Spread.of([after - before for one in self.served for before, after in pairwise(one.events)])

    def rows(self) -> Iterator[Row]:
        """The figures as rows of a report."""
        yield Row(
            metric="output tokens a second", case=self.name, value=self.output_rate, unit="tokens/s", share=self.share
        )
        yield Row(metric="prompt and output tokens a second", case=self.name, value=self.total_rate, unit="tokens/s")
        yield Row(metric="requests a second", case=self.name, value=self.request_rate, unit="1/s")
        for name, spread in (("TTFT", self.ttft), ("TPOT", self.tpot), ("ITL", self.itl)):
            for statistic, value in attrs.asdict(spread).items():
                yield Row(metric=f"{name} {statistic}", case=self.name, value=value, unit="ms")
        yield Row(metric="requests", case=self.name, value=len(self.answers), unit="requests")
        yield Row(metric="errors", case=self.name, value=sum(self.errors.values()), unit="requests")
        if self.good is not None:
            yield Row(metric="goodput", case=self.name, value=self.good / self.seconds, unit="1/s")
        if self.cores is not None:
            yield Row(metric="CPU cores of the server", case=self.name, value=self.cores, unit="cores")
        yield Row(metric="CPU cores of the busiest load process", case=self.name, value=self.load_cores, unit="cores")


def percentile(ordered: Sequence[float], part: float) -> float:
    """A percentile of ascending values, linear between neighbours."""
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def within(answered: Answered, ttft: float | None, tpot: float | None) -> bool:
    """Whether a request met the objectives (time to first token, time per output token), in ms."""
    return (ttft is None or answered.ttft * 1e3 <= ttft) and (tpot is None or (answered.tpot or 0.0) * 1e3 <= tpot)


def print_levels(levels: Sequence[Level], machine: str, input_len: int, output_len: int) -> None:
    """Print a table of rates and one of latencies; errors on stderr."""
    print_table(
        ("load", "requests", "errors", "output tokens/s", "all tokens/s", "requests/s", "goodput, 1/s", "CPU cores",
         "of roofline", "busiest load process, cores"),
        [
            (
                one.name,
                len(one.answers),
                sum(one.errors.values()),
                f"{one.output_rate:,.0f}",
                f"{one.total_rate:,.0f}",
                f"{one.request_rate:,.2f}",
                "" if one.good is None else f"{one.good / one.seconds:,.2f}",
                "" if one.cores is None else f"{one.cores:.2f}",
                percent(one.share),
                f"{one.load_cores:.2f}",
            )
            for one in levels
        ],
        title=f"serving {input_len} in / {output_len} out on {machine}",
    )  # fmt: skip
    statistics = ("mean", "p50", "p90", "p99")
    print_table(
        ("load", *(f"{name} {statistic}" for name in ("TTFT", "TPOT", "ITL") for statistic in statistics)),
        [
            (
                one.name,
                *(
                    f"{getattr(spread, statistic):.2f}"
                    for spread in (one.ttft, one.tpot, one.itl)
                    for statistic in statistics
                ),
            )
            for one in levels
        ],
        title="ms",
    )
    for one in levels:
        for error, count in one.errors.most_common(5):
            say(f"{one.name}: {count} x {error}")
