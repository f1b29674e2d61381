"""Attributes device time to the modules that launched the kernels, so that all times, with idle time, sum to the steps.

A replay of a CUDA graph is one call, whatever the graph holds. So each captured step is run again kernel by kernel, as
a *twin* (`layer_events.TWIN`), and the kernels of a replay are matched with those of the twin by order and name. If the
kernels differ, the profile is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from engine.core.errors import ControlError
from engine.core.profiling.layer_events import (
    REPLAY,
    Event,
    HostEvents,
    Launch,
    ModuleTimes,
    Ran,
    Twin,
    is_collective,
)

COPIED, FILLED = "memcpy", "memset"
"""Prefixes of the names of the kernels with which the driver copies and fills in a CUDA graph, such as memcpy32_post.
Outside of graphs, copies and fills have names with the same prefixes, capitalized."""
COPIES = "(copies in graphs)"
"""Line of the copies in replays whose order differs from that in the twin."""
OUTSIDE = "(outside of steps)"
"""Line of what ran on the device but was not launched in a step."""


@frozen
class Attribution:
    """The times of some consecutive steps by module, in the order in which modules first appear, us."""

    steps: int
    span: float
    """us from the start of the first step to the start of the step after the last."""
    modules: Mapping[str, ModuleTimes]

    @property
    def idle(self) -> float:
        """us in which nothing ran on the device."""
        return self.span - sum(one.device for one in self.modules.values())


def attribute(
    events: Iterable[Event], *, graphs: Mapping[int, str] = {}, first: int = 0, device: str = "cuda"
) -> Attribution:
    """Attribute the times of all steps from number `first` on, except the last, whose start ends the step before.

    graphs: number of a step -> key of the CUDA graphs that it replays, as in its twin's annotation. device: "cuda", or
    "cpu", where the outermost operators take the place of kernels.

    Raises ControlError if there are fewer than two steps, if nothing ran, or if a replay differs from its twin.
    """
    host = HostEvents(first, device)
    kernels = host.read(events)
    last = max(host.steps, default=first)
    if last <= first:
        raise ControlError("fewer than two steps were recorded, so that no step has an end; run more steps")
    if device == "cpu":
        _add_device_times(host.modules, host.operators, host.steps[first], host.steps[last])
        return Attribution(last - first, host.steps[last] - host.steps[first], host.modules)
    device_events = _DeviceEvents(host, kernels)
    ran = device_events.attributed(graphs, first, last)
    begin, end = device_events.begins[first], device_events.begins[last]
    _add_device_times(host.modules, ran, begin, end)
    for number in range(first, last):
        _add_replays(host, graphs.get(number, ""), number, device_events.replays[number])
    return Attribution(last - first, end - begin, host.modules)


class _DeviceEvents:
    """The kernels and copies that ran on the device, by the calls that launched them."""

    def __init__(self, host: HostEvents, kernels: Iterable[Event]) -> None:
        self._host = host
        self._outside: list[Event] = []
        self._by_launch: dict[int, list[Event]] = {}
        self.begins: dict[int, float] = {}
        """Number of a step -> start of the first kernel or copy that it launched, us."""
        self.replays: Counter[int] = Counter()
        """Number of a step -> number of CUDA graphs that it replayed."""
        for event in sorted(kernels, key=lambda event: event["ts"]):
            correlation = event.get("args", {}).get("correlation")
            launch = host.launches.get(correlation)
            if launch is None:
                self._outside.append(event)
                continue
            self._by_launch.setdefault(correlation, []).append(event)
            if launch.step is not None:
                self.begins.setdefault(launch.step, event["ts"])

    def _why_none(self, step: int) -> str:
        """Why no kernel of a step is known."""
        matched = sum(map(len, self._by_launch.values()))
        if not matched and not self._outside:
            return (
                "the profiler saw no kernel; is another profiler attached to the device, or does torch lack its tracing"
                " (CUPTI)?"
            )
        return (
            f"the profiler saw no kernel of step {step}, of {len(self._host.steps)} steps with"
            f" {len(self._host.launches)} calls that launch kernels; it saw {matched} kernels of other calls and"
            f" {len(self._outside)} of unknown ones"
        )

    def attributed(self, graphs: Mapping[int, str], first: int, last: int) -> list[Ran]:
        """All kernels and copies with their modules. graphs, first: as in `attribute`; last: the step not counted."""
        if first not in self.begins or last not in self.begins:
            raise ControlError(self._why_none(first if first not in self.begins else last))
        ran = [_ran(event, OUTSIDE, False) for event in self._outside]
        matches = {key: _Match(key, twin, self._host, self._by_launch) for key, twin in self._host.twins.items()}
        for correlation, launch in self._host.launches.items():
            events = self._by_launch.get(correlation, [])
            if not events or launch.step is None:  # a call that launches nothing; a twin, which is no step
                continue
            if not launch.replays:
                ran += (_ran(event, launch.module, launch.collective) for event in events)
            elif not first <= launch.step < last:
                ran += (_ran(event, OUTSIDE, False) for event in events)
            else:
                match = matches.get(graphs.get(launch.step, ""))
                if match is None:
                    raise ControlError(
                        f"step {launch.step} replays a CUDA graph that was not run kernel by kernel as well; profile"
                        " with --graphs off instead"
                    )
                ran += match.attributed(self.replays[launch.step], events)
                self.replays[launch.step] += 1
        return ran


def _add_replays(host: HostEvents, key: str, number: int, replays: int) -> None:
    """Count a step's replays, and the calls of modules in them. key: that of the step's graphs; empty: none."""
    if not key:
        return
    twin = host.twins.get(key)
    graphs = 1 if twin is None else len(twin.launches)
    if twin is None or not replays or replays % graphs:
        raise ControlError(
            f"step {number} replayed {replays} CUDA graphs, where {key} consists of {graphs}; run with --graphs off"
            " instead"
        )
    host.modules.setdefault(REPLAY, ModuleTimes()).calls += replays
    for module, calls in twin.calls.items():
        host.modules[module].calls += calls * (replays // graphs)


class _Match:
    """Matches the kernels of replays with those of one twin."""

    def __init__(self, key: str, twin: Twin, host: HostEvents, by_launch: Mapping[int, Sequence[Event]]) -> None:
        self._key = key
        self._graphs = [
            [_of_launch(event, host.launches[one]) for one in graph for event in by_launch.get(one, ())]
            for graph in twin.launches
        ]

    def attributed(self, place: int, events: Sequence[Event]) -> Iterator[Ran]:
        """The kernels of one replay with their modules. place: number of the replay in its step.

        Raises ControlError if the kernels are not those of the twin.
        """
        expected = self._graphs[place % len(self._graphs)]
        if [_kind(event["name"]) for event in events] == [_kind(one.name) for one in expected]:
            return (_ran(event, one.module, one.collective) for event, one in zip(events, expected, strict=True))
        kernels, twins = [one for one in events if not _is_copy(one)], [one for one in expected if not one.copy]
        self._compare([one["name"] for one in kernels], [one.name for one in twins], place)
        whose = iter(twins)
        found = []
        for event in events:
            if _is_copy(event):
                found.append(_ran(event, COPIES, False))
            else:
                one = next(whose)
                found.append(_ran(event, one.module, one.collective))
        return iter(found)

    def _compare(self, found: Sequence[str], expected: Sequence[str], place: int) -> None:
        if found == expected:
            return
        number = next(
            (index for index, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other),
            min(len(found), len(expected)),
        )
        one, other = (names[number] if number < len(names) else "nothing" for names in (found, expected))
        raise ControlError(
            f"a replay of the CUDA graphs of {self._key} has {len(found)} kernels and the same step without graphs"
            f" {len(expected)}; the first that differs is number {number} of graph {place % len(self._graphs)}: {one}"
            f" in the replay, {other} without. Their modules would be guessed; run with --graphs off instead"
        )


def _add_device_times(modules: dict[str, ModuleTimes], ran: Iterable[Ran], begin: float, end: float) -> None:
    """Add device time to the modules, so that all modules' times sum to the time in which anything runs.

    Where kernels overlap, the time belongs to the one that ends first: a kernel may start, and wait, while those before
    it run.
    """
    counted: list[tuple[float, float]] = []
    """The union of the spans so far, in order; they do not touch."""
    for one in sorted(ran, key=lambda one: one.end):
        if begin <= one.begin < end:
            modules.setdefault(one.module, ModuleTimes()).kernels += 1
        first, last = max(one.begin, begin), min(one.end, end)
        own = last - first
        if own <= 0:
            continue
        while counted and counted[-1][1] >= first:
            earlier = counted.pop()
            own -= min(earlier[1], last) - max(earlier[0], first)
            first = min(first, earlier[0])
        counted.append((first, last))
        if own > 0:
            times = modules.setdefault(one.module, ModuleTimes())
            times.device += own
            times.collective += own * one.collective


def _of_launch(event: Event, launch: Launch) -> Ran:
    return _ran(event, launch.module, launch.collective)


def _ran(event: Event, module: str, collective: bool) -> Ran:
    begin, name = event["ts"], event["name"]
    return Ran(begin, begin + event["dur"], name, module, collective or is_collective(name), _is_copy(event))


def _is_copy(event: Event) -> bool:
    """Whether an event is a copy or a fill: an operation of its own, or in a replay a kernel of the driver."""
    return event["cat"] != "kernel" or _kind(event["name"]) in (COPIED, FILLED)


def _kind(name: str) -> str:
    """The name of a kernel; COPIED or FILLED for copies and fills, whose names in a replay differ."""
    for kind in (COPIED, FILLED):
        if name.startswith((kind, kind.capitalize())):
            return kind
    return name
