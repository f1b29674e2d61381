"""Reads a trace of torch.profiler: the host time of each module in steps, and the module that launched each kernel.

The events are those of the Chrome trace, plain data. Annotations mark steps, calls of modules and collectives (`STEP`,
`MODULE`, `COLLECTIVE`); a kernel belongs to the innermost module around the call that launched it, which has the
kernel's correlation id. A captured step that is run kernel by kernel is a *twin* of its CUDA graphs (layer_times.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field, frozen

STEP = "[step] "
"""Prefix of the annotation of a step, before the step's number."""
MODULE = "[module] "
"""Prefix of the annotation of a call of a module, before the module's name."""
PART = "[part] "
"""Prefix of the annotation of work that belongs to a module but is no call of it, before the module's name."""
COLLECTIVE = "[collective]"
"""Annotation of an operation in which all ranks take part."""
KERNEL = "[kernel]"
"""Annotation of a call that may compute without operators of PyTorch: on a CPU, the call counts as an operator."""
TWIN = "[twin] "
"""Prefix of the annotation of a twin, before the key of its CUDA graphs."""
BREAK = "[break]"
"""Annotation, within that of a twin, of a graph break: a graph ends, and the next begins."""

BATCH = "(batch)"
"""What a step does outside of all modules: preparing the batch, launching."""
REPLAY = "(graph replay)"
"""The calls that replay CUDA graphs. The kernels of a replay belong to modules."""
ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
COLLECTIVE_NAMES = ("nccl", "all_reduce", "allreduce", "all_gather", "allgather", "gloo:", "c10d::")
"""Parts, in lower case, of the names of kernels and operators in which ranks wait for each other."""

Event = Mapping[str, Any]
"""An event of a Chrome trace: cat, name, ts and dur (us), pid, tid, args."""


@define
class ModuleTimes:
    """The times of one module, summed over the steps, us."""

    calls: int = 0
    """Not counting a module's calls of itself."""
    cpu: float = 0.0
    """Host time in the module, without that of modules called within."""
    device: float = 0.0
    collective: float = 0.0
    """The part of `device` in kernels in which ranks wait for each other."""
    kernels: int = 0
    """Number of kernels and copies; without a GPU, of operators."""


@frozen
class Launch:
    """A call that launched work on the device, and the module that made the call."""

    module: str
    collective: bool
    step: int | None
    """None: the call is part of a twin."""
    replays: bool
    """Whether the call replays a CUDA graph."""


@frozen
class Ran:
    """One run of a kernel, a copy or an operator."""

    begin: float
    end: float
    name: str
    module: str
    collective: bool
    copy: bool = False


@define
class Twin:
    """A captured step, run kernel by kernel."""

    launches: list[list[int]] = field(factory=lambda: [[]])
    """Per graph, the correlation ids of the calls, in order."""
    calls: Counter[str] = field(factory=Counter)


@define
class _Open:
    """An annotation that has not ended, while the host's events are read in order."""

    end: float
    module: str
    collective: bool
    step: int | None
    """Number of the step that the annotation marks, or is in."""
    counts: bool
    """Whether the times of that step are added up."""
    own: float
    """Duration less that of other modules' calls and of graph replays within."""
    account: _Open | None = None
    """The annotation around this one, of the same module, whose `own` includes this one's time; None: there is none."""


class HostEvents:
    """What the host's events say: the host time of modules, and the module of each launch."""

    def __init__(self, first: int, device: str) -> None:
        self._first = self._last = first
        self._takes_operators = device == "cpu"
        self.modules: dict[str, ModuleTimes] = {}
        self.steps: dict[int, float] = {}
        """Number of a step -> its start, us."""
        self.launches: dict[int, Launch] = {}
        """By correlation id, in the order in which they were made."""
        self.twins: dict[str, Twin] = {}
        self.operators: list[Ran] = []
        """Without a GPU: the outermost operators in steps, calls annotated with `KERNEL`, and collectives."""
        self._open: list[_Open] = []
        self._twin: Twin | None = None
        self._busy_until = 0.0
        """End of the latest of `operators`."""

    def read(self, events: Iterable[Event]) -> list[Event]:
        """Read the host's events of the threads that run steps; return the events of the device."""
        spans = [event for event in events if event.get("ph") == "X"]
        threads = {(event["pid"], event["tid"]) for event in spans if _is_mark(event)}
        wanted = ("user_annotation", "cpu_op", *LAUNCHES)
        mine = [one for one in spans if one.get("cat") in wanted and (one["pid"], one["tid"]) in threads]
        self._last = max((_number(event) for event in mine if event["name"].startswith(STEP)), default=self._first)
        for event in sorted(mine, key=lambda one: (one["ts"], -one["dur"])):
            self._close(event["ts"])
            if event["cat"] == "user_annotation":
                self._annotation(event)
            elif not self._open:
                continue
            elif event["cat"] in LAUNCHES:
                self._launch(event)
            else:
                self._operator(event, is_collective(event["name"]))
        self._close(float("inf"))
        return [event for event in spans if event.get("cat") in ON_DEVICE]

    def _annotation(self, event: Event) -> None:
        name, end, own = event["name"], event["ts"] + event["dur"], event["dur"]
        if name.startswith(STEP):
            number = _number(event)
            self.steps[number] = event["ts"]
            counts = self._first <= number < self._last
            self._open = [_Open(end, BATCH, False, number, counts, own)]
            if counts:
                self.modules.setdefault(BATCH, ModuleTimes())
        elif name.startswith(TWIN):
            self._twin = self.twins.setdefault(name.removeprefix(TWIN), Twin())
            self._open = [_Open(end, BATCH, False, None, False, own)]
        elif not self._open:
            return
        elif name.startswith(MODULE):
            self._module(name.removeprefix(MODULE), end, own, 1)
        elif name.startswith(PART):
            self._module(name.removeprefix(PART), end, own, 0)
        elif name == COLLECTIVE:
            self._operator(event, True)
            top = self._open[-1]
            self._open.append(_Open(end, top.module, True, top.step, top.counts, 0.0, top.account or top))
        elif name == KERNEL:
            self._operator(event, False)
        elif name == BREAK and self._twin is not None:
            self._twin.launches.append([])

    def _module(self, name: str, end: float, duration: float, calls: int) -> None:
        top = self._open[-1]
        account = top.account or top
        if name == top.module:
            self._open.append(_Open(end, name, top.collective, top.step, top.counts, 0.0, account))
            return
        account.own -= duration
        times = self.modules.setdefault(name, ModuleTimes())
        times.calls += calls * top.counts
        if self._twin is not None:
            self._twin.calls[name] += calls
        self._open.append(_Open(end, name, top.collective, top.step, top.counts, duration))

    def _launch(self, event: Event) -> None:
        correlation = event.get("args", {}).get("correlation")
        if correlation is None or correlation in self.launches:  # a call of the driver within one of the runtime
            return
        top, replays = self._open[-1], "GraphLaunch" in event["name"]
        if self._twin is not None:
            self._twin.launches[-1].append(correlation)
        if replays and top.counts:
            self.modules.setdefault(REPLAY, ModuleTimes()).cpu += event["dur"]
            (top.account or top).own -= event["dur"]
        self.launches[correlation] = Launch(top.module, top.collective, top.step, replays)

    def _operator(self, event: Event, collective: bool) -> None:
        """Record an operator, a kernel or a collective that is not within another."""
        begin, top = event["ts"], self._open[-1]
        if self._takes_operators and top.counts and begin >= self._busy_until:
            self._busy_until = begin + event["dur"]
            self.operators.append(Ran(begin, self._busy_until, event["name"], top.module, collective))

    def _close(self, now: float) -> None:
        """Remove the annotations that have ended, and add their host time to their modules."""
        while self._open and self._open[-1].end <= now:
            done = self._open.pop()
            if done.counts and done.account is None:
                self.modules[done.module].cpu += done.own
            if not self._open:
                self._twin = None


def is_collective(name: str) -> bool:
    """Whether ranks wait for each other in a kernel or operator of this name."""
    lower = name.lower()
    return any(part in lower for part in COLLECTIVE_NAMES)


def _is_mark(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith((STEP, TWIN))


def _number(event: Event) -> int:
    return int(event["name"].removeprefix(STEP))
