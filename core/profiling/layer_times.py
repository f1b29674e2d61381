"""Attributes what ran on a device to the modules that launched it, so that their times sum to that of the steps.

A replay of a CUDA graph is one call, whatever it holds. So the step that was captured is run once more kernel by kernel
(`layer_events.TWIN`), and the kernels of a replay are matched with those of that run by order and name: they are the
same, or the profile is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from engine.core.errors import ControlError
from engine.core.profiling.layer_events import Event, HostEvents, Launch, ModuleTimes, Ran, Twin, is_collective

COPIES = "(copies in graphs)"
"""Copies within replays whose order differs from that of the twin."""
OUTSIDE = "(outside of steps)"
"""What ran on the device without having been launched within a step."""


@frozen
class Attribution:
    """The times of some consecutive steps by module, in the order in which modules first appear, us."""

    steps: int
    span: float
    """us from the begin of the first step to the begin of the step after the last."""
    modules: Mapping[str, ModuleTimes]

    @property
    def idle(self) -> float:
        """us in which nothing ran on the device."""
        return self.span - sum(one.device for one in self.modules.values())


def attribute(
    events: Iterable[Event], *, graphs: Mapping[int, str] = {}, first: int = 0, device: str = "cuda"
) -> Attribution:
    """Attribute the times of all steps from number `first` on, except the last, which only ends the one before.

    graphs: number of a step -> key of the graphs that it replays, as in its twin's annotation. device: "cpu": operators
    take the place of kernels, those within others not counted.

    Raises ControlError if fewer than two steps are there, if nothing ran, or if a replay is not what its twin is.
    """
    host = HostEvents(first, device)
    kernels = host.read(events)
    last = max(host.steps, default=first)
    if last <= first:
        raise ControlError("fewer than two steps were recorded, so that no step has an end; run more steps")
    ran, begin, end = host.operators, host.steps[first], host.steps[last]
    if device != "cpu":
        ran, begin, end = _on_device(host, kernels, graphs, first, last)
    _add_device_times(host.modules, ran, begin, end)
    for number in range(first, last):
        if twin := host.twins.get(graphs.get(number, "")):
            repeats = host.replays[number] // len(twin.launches)
            for module, calls in twin.calls.items():
                host.modules[module].calls += calls * repeats
    return Attribution(last - first, end - begin, host.modules)


def _on_device(
    host: HostEvents, kernels: Sequence[Event], graphs: Mapping[int, str], first: int, last: int
) -> tuple[list[Ran], float, float]:
    """What ran on the device with its module, and the begin and the end of the steps there."""
    by_launch: dict[int, list[Event]] = {}
    ran: list[Ran] = []
    for event in kernels:
        correlation = event.get("args", {}).get("correlation")
        if correlation in host.launches:
            by_launch.setdefault(correlation, []).append(event)
        else:
            ran.append(_ran(event, OUTSIDE, False))
    for events in by_launch.values():
        events.sort(key=lambda event: event["ts"])
    begins: dict[int, float] = {}
    places: Counter[int] = Counter()
    matches = {key: _Match(key, twin, host, by_launch) for key, twin in host.twins.items()}
    for correlation, launch in host.launches.items():
        events = by_launch.get(correlation, [])
        if launch.step is None:
            continue  # of a twin, which is no step
        if events:
            begins[launch.step] = min(begins.get(launch.step, float("inf")), events[0]["ts"])
        if not launch.replays:
            ran += (_ran(event, launch.module, launch.collective) for event in events)
        elif launch.step < first or launch.step >= last:
            ran += (_ran(event, OUTSIDE, False) for event in events)
        else:
            match = matches.get(graphs.get(launch.step, ""))
            if match is None:
                raise ControlError(f"step {launch.step} replays a CUDA graph that was not run kernel by kernel as well")
            ran += match.attributed(places[launch.step], events)
            places[launch.step] += 1
    for number in range(first, last):
        key = graphs.get(number, "")
        expected = len(host.twins[key].launches) if key in host.twins else 1
        if key and (not host.replays[number] or host.replays[number] % expected):
            raise ControlError(
                f"step {number} replayed {host.replays[number]} CUDA graphs, where {key} consists of {expected};"
                " profile with --graphs off instead"
            )
    if first not in begins or last not in begins:
        raise ControlError(
            "the profiler saw no kernel of these steps; is another profiler attached to the device, or does torch lack"
            " its tracing (CUPTI)?"
        )
    return ran, begins[first], begins[last]


class _Match:
    """Matches the kernels of replays with those of one twin."""

    def __init__(self, key: str, twin: Twin, host: HostEvents, by_launch: Mapping[int, Sequence[Event]]) -> None:
        self._key = key
        self._graphs = [
            [_of_launch(event, host.launches[one]) for one in graph for event in by_launch.get(one, ())]
            for graph in twin.launches
        ]

    def attributed(self, place: int, events: Sequence[Event]) -> Iterator[Ran]:
        """What one replay ran. place: number of the replay in its step. Raises ControlError if it is something else."""
        expected = self._graphs[place % len(self._graphs)]
        if [event["name"] for event in events] == [one.name for one in expected]:
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
            f" in the replay, {other} without. Their modules would be guessed; profile with --graphs off instead"
        )


def _add_device_times(modules: dict[str, ModuleTimes], ran: Iterable[Ran], begin: float, end: float) -> None:
    """Add up the time of each module's own, so that the sum is the time in which anything runs.

    Where kernels overlap, the time belongs to the one that ends first: a kernel may be set up, and wait, while those
    before it run.
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
    copy: bool = event["cat"] != "kernel"
    return copy
