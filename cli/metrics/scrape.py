"""Reads /metrics of a server, and computes the growth between two scrapes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from attrs import frozen

from engine.cli.errors import ServerError
from engine.cli.processes import Process, own_cpu_seconds
from engine.core.errors import ConfigError
from engine.server.shared.authority import authority

Labels = tuple[tuple[str, str], ...]

START_TOLERANCE = 1.0
"""Maximum seconds by which the start time of one process differs between scrapes: it moves when the system's clock is
adjusted."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(\S+)(?: +-?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?')
_ESCAPED = re.compile(r"\\(.)")


@frozen
class Scrape:
    """All samples of a server at one moment, and the CPU seconds of its processes."""

    time: float
    """time.monotonic()."""
    samples: Mapping[str, Mapping[Labels, float]]
    """Samples by name, then by labels."""
    cpu: Mapping[str, float]
    """CPU seconds by role, read on this machine; empty if the processes are not on this machine."""

    @classmethod
    def of(cls, text: str, cpu: Mapping[str, float], now: float) -> Scrape:
        """Parse Prometheus' text format. Raises ServerError for other text."""
        samples: dict[str, dict[Labels, float]] = {}
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            if (found := _SAMPLE.fullmatch(line)) is None:
                raise ServerError(f"/metrics answers {line[:60]!r}, which is not Prometheus' text format")
            name, labels, value = found.groups()
            samples.setdefault(name, {})[_labels(labels) if labels else ()] = float(value)
        return cls(now, samples, cpu)

    def of_name(self, name: str) -> Mapping[Labels, float]:
        """The samples of a name, by labels; empty if there are none."""
        return self.samples.get(name, {})

    def values(self, name: str, **labels: str) -> list[float]:
        """The samples of a name that have these labels."""
        wanted = labels.items()
        return [value for found, value in self.of_name(name).items() if wanted <= dict(found).items()]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 if there are none."""
        return sum(self.values(name, **labels))

    def label_values(self, name: str, label: str) -> list[str]:
        """The values of a label among the samples of a name, in the order of /metrics."""
        return list(dict.fromkeys(dict(labels)[label] for labels in self.of_name(name) if label in dict(labels)))


def scrape(host: str, port: int, api_key: str, processes: list[Process]) -> Scrape:
    """Ask a server for its metrics. Raises ConfigError or ServerError."""
    from engine.cli.bench.server_process import get

    status, body = get(host, port, "/metrics", api_key)
    if status != 200:
        raise ConfigError(f"/metrics of {authority(host, port)} answers with status {status}; is --api-key right?")
    cpu = {one.role: own_cpu_seconds(one.pid) for one in processes}
    return Scrape.of(body.decode(), cpu, time.monotonic())


@frozen
class Interval:
    """What a server did between two scrapes.

    Any front end answers for all, with the numbers that the engine processes sent last, so another front end may answer
    with slightly smaller ones. A counter that has become smaller therefore counts as not grown, unless its process was
    restarted, as engine_restarts_total and process_start_time_seconds show: then it began at 0.
    """

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.after.time - self.before.time

    @property
    def cpu(self) -> dict[str, float]:
        """CPU seconds used by each process, read on this machine."""
        return {role: used - self.before.cpu.get(role, 0.0) for role, used in self.after.cpu.items()}

    @property
    def restarted_replicas(self) -> list[str]:
        """The replicas whose engine process has been restarted."""
        counts = self.before.of_name("engine_restarts_total"), self.after.of_name("engine_restarts_total")
        grown = (labels for labels, number in counts[1].items() if number > counts[0].get(labels, 0.0))
        return [dict(labels).get("replica", "0") for labels in grown]

    @property
    def replaced_processes(self) -> list[tuple[str, str]]:
        """(process, number) of each process that is no longer the one of the first scrape."""
        starts = (one.of_name("process_start_time_seconds") for one in (self.before, self.after))
        before, after = starts
        moved = (dict(labels) for labels, at in after.items() if at > before.get(labels, at) + START_TOLERANCE)
        return [(labels["process"], labels["number"]) for labels in moved]

    @property
    def other_server(self) -> bool:
        """Whether the scrapes are of two servers: the same one never has fewer finished requests than before."""
        finished = "engine_requests_finished_total"
        return self.after.sum(finished) < self.before.sum(finished) or any(
            process == "supervisor" for process, _ in self.replaced_processes
        )

    def total(self, name: str, **labels: str) -> float:
        """Growth of all samples of this name that have these labels."""
        wanted = labels.items()
        return sum(grown for found, grown in self._growths(name) if wanted <= dict(found).items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Growth of the samples of this name, with these labels, by the value of a label; in the order of /metrics."""
        wanted = labels.items()
        found: dict[str, float] = {}
        for one, grown in self._growths(name):
            own = dict(one)
            if label in own and wanted <= own.items():
                found[own[label]] = found.get(own[label], 0.0) + grown
        return found

    def _growths(self, name: str) -> Iterator[tuple[Labels, float]]:
        """(labels, growth) of each sample of a name."""
        before = self.before.of_name(name)
        for labels, value in self.after.of_name(name).items():
            first = before.get(labels, 0.0)
            if value < first:
                first = 0.0 if self._began_again(dict(labels)) else value
            yield labels, value - first

    def _began_again(self, labels: Mapping[str, str]) -> bool:
        """Whether the process that counts a sample has been restarted."""
        if "number" in labels:
            return (labels["process"], labels["number"]) in self.replaced_processes
        return labels.get("replica", "0") in self.restarted_replicas


def _labels(text: str) -> Labels:
    """Labels as they are written between braces, sorted by name."""
    pairs = _LABEL.findall(text)
    if "\\" in text:
        pairs = [(name, _ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], value)) for name, value in pairs]
    return tuple(sorted(pairs))
