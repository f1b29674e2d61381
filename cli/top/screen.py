"""The lines of `engine top`: the parts that fit into a width and a height, each part whole."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from engine.cli.http_client import VISIBLE
from engine.cli.metrics.shares import IDLE
from engine.cli.top.figures import Cache, Figures, Latency, Load, ProcessFigures, Roofline
from engine.cli.top.server import Health
from engine.cli.top.units import duration, percent, rate, seconds, size

Style = Literal["", "title", "heading", "warning"]
LABEL = 11
"""Characters of the label before a line's parts."""
BAR = 20
"""Characters of a bar."""
GAP = "   "
"""Between the parts of a line."""
UNKNOWN = "-"


class Line(NamedTuple):
    """A line of the screen."""

    text: str
    style: Style = ""


class Section(NamedTuple):
    """Lines that belong together."""

    name: str
    lines: Sequence[Line]
    cut: bool = False
    """Whether some of the lines may be shown without the last ones."""


class State(NamedTuple):
    """What the screen shows besides figures."""

    url: str
    clock: str
    """The time of day."""
    interval: float
    """Seconds between two scrapes."""
    now: float
    """time.time()."""
    health: Health | None
    """None: unknown."""
    problem: str = ""
    """Why the server does not answer; empty if it does."""
    notice: str = ""
    """Why there are no figures although the server answers; empty if there are, or none yet."""


def lines(state: State, shown: Figures | None, width: int, height: int | None) -> list[Line]:
    """The screen. shown: None before the end of the first interval. height: None: all lines, however many.

    The more important sections come first; those for which no line is left are named in the last one.
    """
    found = [Section("", _head(state, shown, width))]
    if shown is not None:
        found += _sections(shown, width)
    elif not (state.problem or state.notice):
        found.append(Section("", [Line(f"The first figures come after {state.interval:g} s.")]))
    fitted = [line for number, one in enumerate(found) for line in _apart(number, one)]
    if height is not None and len(fitted) > height:
        fitted = _fit(found, height)
    return [Line(line.text.translate(VISIBLE)[:width], line.style) for line in fitted]


def _apart(number: int, section: Section) -> list[Line]:
    """A section with an empty line before; not before the first."""
    return [*([Line("")] if number else []), *section.lines]


def _fit(sections: Sequence[Section], height: int) -> list[Line]:
    """The sections that fit into fewer lines than all need, and the names of those that do not."""
    room, kept, hidden = max(1, height - 1), list[Line](), list[str]()
    for number, section in enumerate(sections):
        wanted = _apart(number, section)
        if len(wanted) <= room:
            kept += wanted
            room -= len(wanted)
        elif section.cut and room > 3:
            rest = len(wanted) - (room - 1)
            kept += [*wanted[: room - 1], Line(f"  and {rest} more")]
            room = 0
        elif number == 0:
            kept += wanted[:room]
            room -= len(kept)
        else:
            hidden.append(section.name)
    return [*kept, Line(f"In a taller terminal: {', '.join(hidden)}." if hidden else "")][:height]


def _head(state: State, shown: Figures | None, width: int) -> list[Line]:
    status = "no answer" if state.problem else state.health.status if state.health is not None else UNKNOWN
    parts = ["engine top", state.url, status]
    if shown is not None:
        parts.append(shown.model)
    if shown is not None and shown.started is not None and not state.problem:
        parts.append(f"up {duration(state.now - shown.started)}")
    right = f"every {state.interval:g} s  {state.clock}"
    left = _joined("", parts, width - len(right) - 2, gap="  ")
    found = [Line(f"{left:{max(0, width - len(right))}}{right}", "title")]
    warnings = [text for text in (state.problem, state.notice) if text]
    if not state.problem:
        warnings += state.health.faults if state.health is not None else ()
        warnings += shown.events if shown is not None else ()
    return found + [Line(text, "warning") for warning in warnings for text in _wrapped(warning, width)]


def _sections(shown: Figures, width: int) -> list[Section]:
    total = shown.total
    found = [
        Section(
            "requests",
            [
                Line(_joined("Requests", _requests(shown), width)),
                Line(_joined("Tokens", _tokens(total), width)),
                Line(_joined("p50 / p95", _latencies(total), width)),
                Line(_joined("KV cache", _cache(total.cache), width)),
            ],
        ),
        Section("phases of a step", _phases(shown, width)),
        Section("roofline", _roofline(shown.roofline, width)),
    ]
    if len(shown.replicas) > 1:
        found.append(Section("replicas", _table(REPLICA_COLUMNS, shown.replicas, width), cut=True))
    if shown.processes:
        found.append(Section("processes", _table(PROCESS_COLUMNS, shown.processes, width), cut=True))
    if shown.collections:
        found.append(Section("garbage collections", [Line(_joined("GC", _collections(shown), width))]))
    return found


def _requests(shown: Figures) -> list[str]:
    total = shown.total
    finished = sum(total.finished.values())
    parts = [
        f"{total.running} running",
        f"{total.waiting} waiting" + (f" ({total.deferred} for a grammar)" if total.deferred else ""),
        f"{rate(finished)} finished/s",
        f"{rate(shown.declined)} declined/s",
        f"{rate(total.preemptions)} preempted/s",
    ]
    reasons = [f"{reason} {rate(count)}/s" for reason, count in total.finished.items() if count]
    return [*parts, *reasons, f"{shown.connections} connections"]


def _tokens(total: Load) -> list[str]:
    parts = [
        f"{rate(total.generated_tokens)} generated/s",
        f"{rate(total.prompt_tokens)} prompt/s",
        f"{rate(total.cached_tokens)} prompt/s cached",
    ]
    return parts if total.tokens_per_step is None else [*parts, f"{rate(total.tokens_per_step)} per step"]


def _latencies(total: Load) -> list[str]:
    def text(name: str, latency: Latency | None) -> str:
        if latency is None:
            return f"{name} {UNKNOWN}"
        return f"{name} {seconds(latency.p50)} / {seconds(latency.p95)}"

    return [text("first token", total.first_token), text("between tokens", total.between_tokens)]


def _cache(cache: Cache) -> list[str]:
    whole = max(1, cache.total)
    used, kept = round(BAR * cache.used / whole), round(BAR * cache.cached / whole)
    bar = f"[{('|' * used + ':' * kept)[:BAR]:{BAR}}]"
    found = [
        f"{bar} {percent(cache.used / whole)} used, {percent(cache.cached / whole)} cached",
        f"hit rate {_known(cache.hit_rate, percent)}",
    ]
    if cache.evictions is not None:
        found.append(f"about {rate(cache.evictions)} evicted/s")
    found.append(f"{cache.total:,} blocks")
    return found + [f"{percent(share)} {reason}" for reason, share in cache.unused.items()]


def _phases(shown: Figures, width: int) -> list[Line]:
    """The phases of a step next to each other; shares of the runner's, which are parts of others, in parentheses."""
    steps, whole = shown.total.steps * shown.seconds, shown.seconds * max(1, len(shown.replicas))
    columns = [("Phase", "ms/step", "share")]
    for one in shown.phases:
        per_step = rate(one.seconds / steps * 1e3) if steps and one.phase != IDLE else UNKNOWN
        share = percent(one.seconds / whole)
        columns.append((one.phase, per_step, f"({share})" if one.share is None else share))
    widths = [LABEL - 2, *(max(map(len, column)) for column in columns[1:])]
    while sum(widths) + len(widths) > width + 1 and len(widths) > 1:
        del columns[-1], widths[-1]
    rows = []
    for row in range(3):
        cells = [f"{column[row]:>{size}}" for column, size in zip(columns[1:], widths[1:], strict=True)]
        rows.append(Line(" ".join([f"{columns[0][row]:{widths[0]}}", *cells]), "" if row else "heading"))
    if shown.shares is not None:
        parts = [f"{name} {percent(share)}" for name, share in shown.shares.items()]
        rows.append(Line(_joined("Shares", parts, width)))
    return rows


def _roofline(rows: Sequence[Roofline], width: int) -> list[Line]:
    if not rows:
        return [Line(_joined("Roofline", ["no step, or not measured (--no-roofline-metrics)"], width))]
    found = _table(ROOFLINE_COLUMNS, rows, width)
    if rows[-1].floor_share is None:
        text = "the peaks of this device are unknown: start the server with --peak-bandwidth and --peak-flops"
        found += [Line(one) for one in _wrapped(text, width)]
    return found


def _collections(shown: Figures) -> list[str]:
    return [
        f"{_role(one.process)} {rate(one.per_second)}/s, mean {seconds(one.mean_pause)}, {percent(one.share)}"
        if one.per_second
        else f"{_role(one.process)} none"
        for one in shown.collections
    ]


def _role(name: str) -> str:
    return name.replace("_", " ")


class Column(NamedTuple):
    """A column of a table."""

    title: str
    text: Callable[..., str]
    """The cell, from a row's figures."""


def _process(one: ProcessFigures) -> str:
    return one.role if one.role == "supervisor" else f"{_role(one.role)} {one.number}"


REPLICA_COLUMNS = (
    Column("Replica", lambda load: str(load.replica)),
    Column("state", lambda load: "up" if load.up else "down"),
    Column("running", lambda load: str(load.running)),
    Column("waiting", lambda load: str(load.waiting)),
    Column("generated/s", lambda load: rate(load.generated_tokens)),
    Column("prompt/s", lambda load: rate(load.prompt_tokens)),
    Column("KV used", lambda load: percent(load.cache.used / max(1, load.cache.total))),
    Column("hits", lambda load: _known(load.cache.hit_rate, percent)),
    Column("steps/s", lambda load: rate(load.steps)),
    Column("of floor", lambda load: _known(load.floor_share, percent)),
    Column("first token p95", lambda load: seconds(load.first_token.p95) if load.first_token else UNKNOWN),
    Column("between p95", lambda load: seconds(load.between_tokens.p95) if load.between_tokens else UNKNOWN),
)
ROOFLINE_COLUMNS = (
    Column("Roofline", lambda row: row.kind),
    Column("steps/s", lambda row: rate(row.steps)),
    Column("ms/step", lambda row: f"{row.step_seconds * 1e3:.2f}"),
    Column("floor ms", lambda row: _known(row.floor_seconds, lambda floor: f"{floor * 1e3:.2f}")),
    Column("of floor", lambda row: _known(row.floor_share, percent)),
    Column("bandwidth", lambda row: _known(row.bandwidth_share, percent)),
    Column("FLOPs", lambda row: _known(row.flops_share, percent)),
    Column("GB/s", lambda row: rate(row.bytes_per_second / 1e9)),
    Column("TFLOP/s", lambda row: rate(row.flops_per_second / 1e12)),
)
PROCESS_COLUMNS = (
    Column("Process", _process),
    Column("CPU", lambda one: _known(one.cores, percent)),
    Column("memory", lambda one: size(one.resident_bytes)),
    Column("threads", lambda one: str(one.threads)),
    Column("files", lambda one: f"{one.descriptors} of {one.max_descriptors}"),
)


def _table(columns: Sequence[Column], rows: Sequence[object], width: int) -> list[Line]:
    """A table; the columns on the right that do not fit are left out."""
    cells = [[column.title, *(column.text(row) for row in rows)] for column in columns]
    sizes = [max(map(len, column)) for column in cells]
    sizes[0] = max(sizes[0], LABEL - 2)
    while sum(sizes) + 2 * (len(sizes) - 1) > width and len(sizes) > 1:
        del cells[-1], sizes[-1]
    found = []
    for number in range(len(rows) + 1):
        right = [f"{column[number]:>{size}}" for column, size in zip(cells[1:], sizes[1:], strict=True)]
        found.append(Line("  ".join([f"{cells[0][number]:{sizes[0]}}", *right]), "" if number else "heading"))
    return found


def _joined(label: str, parts: Iterable[str], width: int, gap: str = GAP) -> str:
    """A label and the parts after it that fit; the first one in any case."""
    text, begin = f"{label:{LABEL}}" if label else "", True
    for part in parts:
        more = part if begin else f"{gap}{part}"
        if not begin and len(text) + len(more) > width:
            break
        text, begin = text + more, False
    return text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), max(20, width))


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else text(value)
