"""The table by layer: times, bytes, FLOPs and floors of an average step, a line per module or per kind of module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from attrs import frozen

from engine.core.profiling.cost import Peaks, Work
from engine.core.profiling.rank_layers import LayerRow, RankLayers

By = Literal["module", "kind"]
IDLE = "(idle)"
"""The line of the time in which nothing ran on the device."""
MANY_LAYERS = 8
"""With more decoder layers, the lines are by kind unless asked for by module."""
EQUAL = 0.05
"""Ranks whose computing times differ by less are called equal."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@frozen(kw_only=True)
class Line:
    """One line of the table: a module, or several alike, in an average step of one rank."""

    name: str
    kind: str
    modules: int
    """Number of modules in this line."""
    calls: float
    kernels: float
    cpu_us: float
    device_us: float
    collective_us: float
    share: float
    """`device_us` as a share of the step."""
    bytes: float
    flops: float
    floor_us: float | None
    """The sum of the modules' floors; None: the peaks are unknown, or nothing is counted."""
    spread_us: float
    """The largest device time of a rank less the smallest."""
    slowest: int
    """The rank with the largest device time."""

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def reached(self) -> float | None:
        """The floor as a share of the device time."""
        return None if self.floor_us is None or not self.device_us else self.floor_us / self.device_us


@frozen(kw_only=True)
class RankTotal:
    """An average step of one rank."""

    rank: int
    step_us: float
    compute_us: float
    """Time in which the device ran anything but collectives."""
    collective_us: float
    """Time in collectives: transferring, or waiting for other ranks."""
    idle_us: float


@frozen(kw_only=True)
class LayerTable:
    """The table of one rank, the one that computes longest, with the spread over all ranks."""

    rank: int
    device: str
    steps: int
    lines: tuple[Line, ...]
    """Modules in the order of their first calls, lines in parentheses, idle time. The device times sum to `step_us`."""
    step_us: float
    bytes: float
    """Bytes of weights and KV cache."""
    flops: float
    floor_us: float | None
    """The least time of a step. Less than the sum of the lines' floors: see cost.py."""
    ranks: tuple[RankTotal, ...]

    @property
    def sum_us(self) -> float:
        """The sum of all lines' device times."""
        return sum(line.device_us for line in self.lines)

    @property
    def busy_us(self) -> float:
        """The time in which the device ran anything."""
        return self.sum_us - sum(line.device_us for line in self.lines if line.name == IDLE)

    @property
    def slowest(self) -> str:
        """Which rank computes longest, and how long others wait for it, in a sentence; empty for one rank."""
        if len(self.ranks) == 1:
            return ""
        longest, shortest = (choose(self.ranks, key=lambda one: one.compute_us) for choose in (max, min))
        more = longest.compute_us / shortest.compute_us - 1 if shortest.compute_us else 0.0
        if more < EQUAL:
            return f"all ranks compute for about the same time: {more:.1%} between the longest and the shortest"
        return (
            f"rank {longest.rank} computes longest: {longest.compute_us:,.1f} us per step, {more:.1%} more than rank"
            f" {shortest.rank}, which spends {shortest.collective_us:,.1f} us in collectives and rank {longest.rank}"
            f" {longest.collective_us:,.1f} us"
        )


def make_layer_table(
    ranks: Sequence[RankLayers], peaks: Peaks | None = None, *, by: By | None = None, depth: int | None = None
) -> LayerTable:
    """Build the table from the answers of all ranks.

    by: kind: `*` replaces the numbers of layers, and modules of equal names share a line; module: each has a line;
    None: kind if there are more than `MANY_LAYERS` layers. depth: number of parts of names that count; None: all.
    """
    totals = tuple(_total(rank) for rank in ranks)
    chosen = max(range(len(ranks)), key=lambda number: totals[number].compute_us)
    shown = ranks[chosen]
    layers = {found[0] for row in shown.rows if (found := NUMBER.search(row.name))}
    as_line = _naming(by or ("kind" if len(layers) > MANY_LAYERS else "module"), depth)
    by_rank = [_grouped(rank.rows, as_line) for rank in ranks]
    lines = []
    for name, rows in sorted(by_rank[chosen].items(), key=lambda item: item[0].startswith("(")):
        device = [sum(row.device_us for row in groups.get(name, ())) for groups in by_rank]
        lines.append(_line(name, rows, shown, peaks, device, [rank.rank for rank in ranks]))
    idle = [rank.idle_us for rank in ranks]
    nothing = LayerRow(
        name=IDLE,
        kind="",
        calls=0,
        kernels=0,
        cpu_us=0,
        device_us=shown.idle_us,
        collective_us=0,
        flops=0,
        flops8=0,
        bytes=0,
    )
    lines.append(_line(IDLE, [nothing], shown, peaks, idle, [rank.rank for rank in ranks]))
    step = Work(flops=shown.flops, flops8=shown.flops8, weight_bytes=shown.bytes)
    return LayerTable(
        rank=shown.rank,
        device=shown.device,
        steps=shown.steps,
        lines=tuple(lines),
        step_us=shown.step_us,
        bytes=shown.bytes,
        flops=shown.flops,
        floor_us=None if peaks is None else step.step_floor(peaks) * 1e6,
        ranks=totals,
    )


def _total(rank: RankLayers) -> RankTotal:
    collective = sum(row.collective_us for row in rank.rows)
    return RankTotal(
        rank=rank.rank,
        step_us=rank.step_us,
        compute_us=rank.step_us - rank.idle_us - collective,
        collective_us=collective,
        idle_us=rank.idle_us,
    )


def _naming(by: By, depth: int | None) -> Callable[[str], str]:
    """The function from the name of a module to the name of its line."""

    def name_of(name: str) -> str:
        if name.startswith("("):
            return name
        if by == "kind":
            name = NUMBER.sub("*", name)
        return name if depth is None else ".".join(name.split(".")[:depth])

    return name_of


def _grouped(rows: Iterable[LayerRow], as_line: Callable[[str], str]) -> dict[str, list[LayerRow]]:
    found: dict[str, list[LayerRow]] = {}
    for row in rows:
        found.setdefault(as_line(row.name), []).append(row)
    return found


def _line(
    name: str,
    rows: Sequence[LayerRow],
    rank: RankLayers,
    peaks: Peaks | None,
    device: Sequence[float],
    ranks: list[int],
) -> Line:
    """device: device time of this line on each rank of `ranks`, us."""
    spent = sum(row.device_us for row in rows)
    return Line(
        name=name,
        kind="/".join(sorted({row.kind for row in rows} - {""})),
        modules=len(rows),
        calls=sum(row.calls for row in rows),
        kernels=sum(row.kernels for row in rows),
        cpu_us=sum(row.cpu_us for row in rows),
        device_us=spent,
        collective_us=sum(row.collective_us for row in rows),
        share=spent / rank.step_us,
        bytes=sum(row.bytes for row in rows),
        flops=sum(row.flops for row in rows),
        floor_us=_floor(rows, peaks),
        spread_us=max(device) - min(device),
        slowest=ranks[device.index(max(device))],
    )


def _floor(rows: Sequence[LayerRow], peaks: Peaks | None) -> float | None:
    works = [Work(flops=row.flops, flops8=row.flops8, weight_bytes=row.bytes) for row in rows if row.kind]
    return None if peaks is None or not works else sum(work.module_floor(peaks) for work in works) * 1e6
