"""What /metrics of a server answers, and the difference of two answers."""

from __future__ import annotations

import time
from collections.abc import Mapping

from attrs import frozen

from engine.cli.processes import Process, own_cpu_seconds
from engine.core.errors import ConfigError

Labels = tuple[tuple[str, str], ...]


@frozen
class Scrape:
    """All samples of a server at one moment, and the CPU seconds of its processes."""

    time: float
    """time.monotonic()."""
    samples: Mapping[tuple[str, Labels], float]
    cpu: Mapping[str, float]
    """CPU seconds by role; empty if the processes are not on this machine."""

    @classmethod
    def of(cls, text: str, cpu: Mapping[str, float], now: float) -> Scrape:
        """Parse Prometheus' text format."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(now, samples, cpu)


def scrape(host: str, port: int, api_key: str, processes: list[Process]) -> Scrape:
    """Ask a server for its metrics. Raises ConfigError."""
    from engine.cli.bench.server_process import get

    status, body = get(host, port, "/metrics", api_key)
    if status != 200:
        raise ConfigError(f"/metrics of {host}:{port} answers with status {status}; is --api-key right?")
    cpu = {one.role: own_cpu_seconds(one.pid) for one in processes}
    return Scrape.of(body.decode(), cpu, time.monotonic())


@frozen
class Interval:
    """What a server did between two scrapes."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.after.time - self.before.time

    @property
    def cpu(self) -> dict[str, float]:
        """CPU seconds used by each process."""
        return {role: used - self.before.cpu.get(role, 0.0) for role, used in self.after.cpu.items()}

    def total(self, name: str, **labels: str) -> float:
        """Growth of all samples of this name that have these labels."""
        wanted = set(labels.items())
        return sum(
            value - self.before.samples.get(key, 0.0)
            for key, value in self.after.samples.items()
            if key[0] == name and wanted <= set(key[1])
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Growth of the samples of this name by the value of a label, in the order of /metrics."""
        values = dict.fromkeys(dict(key[1])[label] for key in self.after.samples if key[0] == name)
        return {value: self.total(name, **{label: value}) for value in values}
