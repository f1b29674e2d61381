"""A model of _ring.c: what each process does, one access to the shared memory at a time.

`explore` lets the processes take their steps in every order, kills one of them at every point (or nobody), and looks in
every state that can be reached for what must not be: a message torn, lost or doubled, or somebody who sleeps for ever.
Atomics are sequentially consistent here, as in _ring.c; that they order the payload is what ThreadSanitizer checks
(test_ring_threads.py). Nobody spins, but for one look by a reader that heeds an announcement. The time of a sleep may
be over at any moment, but nobody may need that: a state in which nothing else would wake somebody is wrong, and so is
one in which somebody sleeps who has not heeded the last announcement.

The bell is not a number here: a process that has read it is `fresh` until it rings, which is all that the number tells.
What a process will not look at again is forgotten, so that equal states are seen to be equal. The steps bear the names
of what they do there. FAULTS are mistakes that the protocol could have, each of which must be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

FAULTS = (
    "no look after the flag",
    "bell read after the flag",
    "flag not set",
    "flags of others taken back",
    "asleep again without a flag",
    "bell not rung",
    "bell not rung at the end",
    "published before filled",
    "room for one too many",
    "received before copied",
    "end looked at after the messages",
)

FAULTS_OF_ANNOUNCEMENTS = (
    "no look for announcements after the flag",
    "announcement not rung",
    "announcement taken for a message",
)

FIRST, FLAGGED, WOKEN, HEEDING = range(4)
"""Why a process looks: it has just come, it has set the flag, it was asleep, there was an announcement."""


class Wrong(Exception):  # noqa: N818
    """The protocol allows what must not be."""


class Case(NamedTuple):
    """What to explore."""

    readers: int
    slots: int
    messages: int
    drop: bool = True
    """What the supervisor does about a dead reader; if not, it ends the ring."""
    deaths: bool = True
    ends: bool = True
    """Whether the writer ends the ring after its last message, which wakes everybody."""
    announces: int = 0
    """How often the writer announces each message, and after the last one that which never comes."""
    fault: str = ""


class Model:
    """One state. Memory and processes are namespaces of numbers, strings and lists of numbers."""

    def __init__(self, case: Case) -> None:
        readers = case.readers
        self.case = case
        self.memory = SimpleNamespace(
            published=0,
            announced=0,
            received=[0] * readers,
            gone=[0] * readers,
            live=readers,
            ended=0,
            flags=[0] * (readers + 1),  # the readers', the writer's
            slots=[-1] * case.slots,
        )
        self.processes = [
            SimpleNamespace(
                kind="read", at="ended", index=index, sequence=0, why=FIRST, fresh=0, seen=0, heeds=0, heeded=0
            )
            for index in range(readers)
        ]
        self.processes.append(
            SimpleNamespace(
                kind="write", at="ended", sequence=0, why=FIRST, fresh=0, room=0, slowest=0, index=0, received=0, told=0
            )
        )
        self.processes.append(SimpleNamespace(kind="supervise", at="watch", victim=-1))

    def key(self) -> tuple[Any, ...]:
        """Equal for equal states."""

        def plain(space: SimpleNamespace) -> tuple[Any, ...]:
            return tuple(tuple(value) if isinstance(value, list) else value for value in vars(space).values())

        return (plain(self.memory), *map(plain, self.processes))

    @classmethod
    def of(cls, case: Case, names: Sequence[tuple[str, ...]], key: tuple[Any, ...]) -> Model:
        """The state of that key; names: of the fields."""
        model = cls.__new__(cls)
        model.case = case
        spaces = [
            SimpleNamespace(
                **{
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in zip(fields, part, strict=True)
                }
            )
            for fields, part in zip(names, key, strict=True)
        ]
        model.memory, model.processes = spaces[0], spaces[1:]
        return model

    def can_step(self, number: int) -> bool:
        """Whether a process has something to do."""
        return self.processes[number].at not in ("asleep", "over", "dead", "watch")

    def step(self, number: int) -> None:
        """Let a process do one thing."""
        process = self.processes[number]
        if process.at.startswith(("wake", "bell ", "all ")):
            self._wake(process)
        elif process.at.startswith("back "):
            self._take_back(process)
        else:
            getattr(self, f"_{process.kind}")(process)

    def can_end_sleep(self, number: int) -> bool:
        """Whether a process sleeps."""
        return self.processes[number].at == "asleep"

    def end_sleep(self, number: int) -> None:
        """Its time is over."""
        process = self.processes[number]
        process.why, process.at = WOKEN, "ended"

    def kill(self, number: int) -> None:
        """One process; the supervisor takes notice."""
        process = self.processes[number]
        for name, value in vars(process).items():
            if isinstance(value, int):
                setattr(process, name, 0)
        process.at = "dead"
        supervisor = self.processes[-1]
        supervisor.victim = number
        drops = self.case.drop and number < self.case.readers
        supervisor.at = "gone" if drops else "end"

    def _pending(self, process: SimpleNamespace) -> None:
        """A look has found nothing."""
        fault = self.case.fault
        if process.why == HEEDING:
            process.heeds, process.heeded, process.why = 0, process.heeds, FIRST
        if process.why == FIRST:
            process.at = "flag" if fault == "bell read after the flag" else "bell"
        elif process.why == FLAGGED:
            process.at = "bell" if fault == "bell read after the flag" else "sleep"
        elif fault == "asleep again without a flag":
            process.fresh = 1
            self._found(process, "sleep")
        else:
            self._found(process, "ended")

    def _found(self, process: SimpleNamespace, then: str) -> None:
        """A look ends the sleep, if there was one: the flag is taken back."""
        process.at = then if process.why in (FIRST, HEEDING) else f"back {then}"

    def _take_back(self, process: SimpleNamespace) -> None:
        mine = process.kind == "write"
        for number in range(len(self.memory.flags)):
            own = number == (self.case.readers if mine else process.index)
            side = (number == self.case.readers) == mine
            if own or (side and self.case.fault == "flags of others taken back"):
                self.memory.flags[number] = 0
        process.why, process.at = FIRST, process.at.removeprefix("back ")

    def _doze(self, process: SimpleNamespace, side: int) -> None:
        """From reading the bell to sleep."""
        memory, fault = self.memory, self.case.fault
        if process.at == "bell":
            process.fresh = 1
            process.at = "sleep" if fault == "bell read after the flag" else "flag"
        elif process.at == "flag":
            if fault != "flag not set":
                memory.flags[self.case.readers if side else process.index] = 1
            process.why = FLAGGED
            process.at = "sleep" if fault == "no look after the flag" else "ended"
        elif not process.fresh:
            process.why, process.at = WOKEN, "ended"
        else:
            process.fresh, process.at = 0, "asleep"

    def _wake(self, process: SimpleNamespace) -> None:
        """`wake`, and from there `ring_the_bell`; `at` is the step, the side, and the steps behind it."""
        name, side_name, behind = process.at.split(" ", 2)
        side = int(side_name)
        memory, fault = self.memory, self.case.fault
        flags = slice(self.case.readers, None) if side else slice(self.case.readers)
        if name == "wake":
            process.at = f"wake-clear {side} {behind}" if any(memory.flags[flags]) else behind
        elif name == "wake-clear":
            was, memory.flags[flags] = any(memory.flags[flags]), [0] * len(memory.flags[flags])
            process.at = f"bell {side} {behind}" if was else behind
        elif name == "bell":
            if fault != "bell not rung" or process.kind == "supervise":
                for other in self.processes[:-1]:
                    if (other.kind == "write") == side:
                        other.fresh = 0
            process.at = f"all {side} {behind}"
        else:
            for other in self.processes[:-1]:
                if other.at == "asleep" and (other.kind == "write") == side:
                    other.why, other.at = WOKEN, "ended"
            process.at = behind

    def _write(self, process: SimpleNamespace) -> None:
        memory, case = self.memory, self.case
        slot = process.sequence % case.slots
        if process.at == "ended":
            if process.why == FIRST and process.told < case.announces:
                process.told += 1
                memory.announced = process.sequence * case.announces + process.told
                process.at = "ended" if case.fault == "announcement not rung" else "wake 0 ended"
            elif process.sequence == case.messages:
                process.at = "end" if case.ends else "over"
            else:
                process.at = "live"
                if memory.ended:
                    self._found(process, "over")
        elif process.at == "live":
            process.at = "received"
            process.slowest = memory.published
            if not memory.live or process.sequence < process.room:
                process.slowest = 0
                self._found(process, "begin fill" if memory.live else "over")
        elif process.at == "received":
            process.received = memory.received[process.index]
            process.at = "gone"
        elif process.at == "gone":
            if not memory.gone[process.index]:
                process.slowest = min(process.slowest, process.received)
            process.index += 1
            process.at = "received"
            if process.index == case.readers:
                process.room = process.slowest + case.slots + (case.fault == "room for one too many")
                process.slowest = process.index = process.received = 0
                if process.sequence < process.room:
                    self._found(process, "begin fill")
                else:
                    self._pending(process)
        elif process.at in ("bell", "flag", "sleep"):
            self._doze(process, 1)
        elif process.at == "begin fill":
            memory.slots[slot] = -2  # half of it
            process.at = "publish" if case.fault == "published before filled" else "end fill"
        elif process.at == "clear":
            memory.announced = process.told = 0
            process.at = "publish"
        elif process.at == "end fill":
            memory.slots[slot] = process.sequence
            process.at = "clear" if case.announces else "publish"
            if case.fault == "published before filled":
                process.sequence += 1
                process.why, process.fresh, process.at = FIRST, 0, "wake 0 ended"
        elif process.at == "publish":
            memory.published = process.sequence + 1
            if case.fault == "published before filled":
                process.at = "end fill"
            else:
                process.sequence += 1
                process.why, process.fresh, process.at = FIRST, 0, "wake 0 ended"
        elif process.at == "end":
            memory.ended = 1
            process.at = "over" if case.fault == "bell not rung at the end" else "bell 0 bell 1 over"

    def _read(self, process: SimpleNamespace) -> None:
        memory, case = self.memory, self.case
        late = case.fault == "end looked at after the messages"
        if process.at == "ended":
            process.seen = memory.ended
            process.at = "gone"
        elif process.at == "gone":
            process.at = "published"
            if memory.gone[process.index]:
                self._found(process, "over")
        elif process.at == "published":
            seen, process.seen = process.seen, 0
            if memory.published != process.sequence:
                self._found(process, "receive" if case.fault == "received before copied" else "copy")
            elif late:
                process.at = "late"
            elif seen:
                self._found(process, "over")
            elif case.announces and self._listens(process):
                process.at = "announced"
            else:
                self._pending(process)
        elif process.at == "announced":
            if memory.announced in (0, process.heeded):
                self._pending(process)
            else:
                self._found(process, "copy" if case.fault == "announcement taken for a message" else "heed")
        elif process.at == "heed":
            process.heeds, process.why, process.at = memory.announced, HEEDING, "ended"
        elif process.at == "late":
            if memory.ended:
                self._found(process, "over")
            else:
                self._pending(process)
        elif process.at in ("bell", "flag", "sleep"):
            self._doze(process, 0)
        elif process.at == "copy":
            process.heeds = process.heeded = 0
            if memory.slots[process.sequence % case.slots] != process.sequence:
                raise Wrong(f"reader {process.index} copies message {process.sequence} from {memory.slots}")
            process.at = "receive"
            if case.fault == "received before copied":
                process.sequence += 1
                process.why, process.fresh, process.at = FIRST, 0, "wake 1 ended"
        elif process.at == "receive":
            memory.received[process.index] = process.sequence + 1
            if case.fault == "received before copied":
                process.at = "copy"
            else:
                process.sequence += 1
                process.why, process.fresh, process.at = FIRST, 0, "wake 1 ended"

    def _listens(self, process: SimpleNamespace) -> bool:
        """Whether a reader looks for announcements too."""
        skips = self.case.fault == "no look for announcements after the flag" and process.why == FLAGGED
        return process.why in (FLAGGED, WOKEN) and not skips

    def _supervise(self, process: SimpleNamespace) -> None:
        """After a death."""
        memory = self.memory
        if process.at == "gone":
            memory.gone[process.victim] = 1
            process.at = "live"
        elif process.at == "live":
            memory.live -= 1
            process.at = "bell 1 bell 0 over"
        else:
            memory.ended = 1
            process.at = "bell 0 bell 1 over"

    def check_end(self) -> None:
        """Nobody can do anything: everybody alive must be done, and have everything."""
        *readers, writer, supervisor = self.processes
        needed = self.case.messages if not self.case.ends else -1
        if any(process.at == "asleep" and process.sequence != needed for process in self.processes):
            raise Wrong(f"somebody sleeps for ever: {self.processes}, {self.memory}")
        if supervisor.victim < 0 and writer.sequence != self.case.messages:
            raise Wrong(f"the writer stopped: {writer}")
        interrupted = 0 <= supervisor.victim < self.case.readers and not self.case.drop
        for reader in readers:
            if reader.at == "asleep" and self.memory.announced not in (0, reader.heeded):
                raise Wrong(f"{reader} sleeps through an announcement: {self.memory}")
            if reader.at == "over" and reader.sequence != self.memory.published and not interrupted:
                raise Wrong(f"{reader} has not received all: {self.memory}")


def _next(model_key: tuple[Any, ...], case: Case, names: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
    """States one step from here."""
    model = Model.of(case, names, model_key)
    movers = [number for number in range(len(model.processes)) if model.can_step(number)]
    alive = [number for number, process in enumerate(model.processes[:-1]) if process.at not in ("over", "dead")]
    if not movers:
        model.check_end()
    for number in alive:
        if model.can_end_sleep(number):
            after = Model.of(case, names, model_key)
            after.end_sleep(number)
            yield after.key()
    for number in movers:
        after = Model.of(case, names, model_key)
        after.step(number)
        yield after.key()
    if case.deaths and model.processes[-1].victim < 0:
        for number in alive:
            after = Model.of(case, names, model_key)
            after.kill(number)
            yield after.key()


def explore(case: Case) -> int:
    """Visit every state; returns how many there are. Raises Wrong."""
    first = Model(case)
    names = [tuple(vars(space)) for space in (first.memory, *first.processes)]
    todo = [first.key()]
    seen = set(todo)
    while todo:
        for key in _next(todo.pop(), case, names):
            if key not in seen:
                seen.add(key)
                todo.append(key)
    return len(seen)


@pytest.mark.parametrize(
    "case",
    [
        Case(readers=1, slots=1, messages=3),
        Case(readers=1, slots=1, messages=3, drop=False),
        Case(readers=1, slots=2, messages=3),
        Case(readers=2, slots=1, messages=1, deaths=False),
        Case(readers=2, slots=1, messages=1, deaths=False, ends=False),
        Case(readers=1, slots=1, messages=2, announces=1),
        Case(readers=1, slots=1, messages=2, announces=2, deaths=False),
        Case(readers=2, slots=1, messages=0, announces=1, deaths=False, ends=False),
        # For changes of the protocol, half a minute:
        # Case(readers=2, slots=1, messages=1): 153,371 states
        # Case(readers=2, slots=1, messages=1, announces=1, deaths=False, ends=False): 266,571
    ],
    ids=lambda case: (
        f"{case.readers}-{case.slots}-{case.messages}-{case.drop:d}{case.deaths:d}{case.ends:d}-{case.announces}"
    ),
)
def test_no_order_of_steps_and_no_death_loses_tears_or_hangs(case: Case) -> None:
    assert explore(case) > 1000


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_protocol_would_be_found(fault: str) -> None:
    case = Case(readers=1, slots=1, messages=2, fault=fault)
    if fault == "flags of others taken back":
        case = Case(readers=2, slots=1, messages=1, deaths=False, ends=False, fault=fault)
    with pytest.raises(Wrong):
        explore(case)


@pytest.mark.parametrize("fault", FAULTS_OF_ANNOUNCEMENTS)
def test_a_fault_of_announcements_would_be_found(fault: str) -> None:
    with pytest.raises(Wrong):
        explore(Case(readers=1, slots=1, messages=1, announces=1, deaths=False, ends=False, fault=fault))
