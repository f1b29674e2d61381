"""The sequences that decode, kept so that a step only touches those to which something happens."""

from __future__ import annotations

from collections import defaultdict

from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter


class DecodeSet:
    """Sequences past their prompts: those that take part in every step, and those held back for want of room.

    A sequence that takes part gains a token a tick, by the clock alone; nothing is written to it. It is filed under the
    tick at which that ends, `RequestState.due`: all its tokens are then planned, or it needs another block. So long as
    nobody joins, leaves or is due, planning a step does not depend on how many take part.
    """

    def __init__(self, clock: StepCounter) -> None:
        self._clock = clock
        self._active: dict[int, RequestState] = {}  # by sequence number, in the order of the batch
        self._held: dict[int, RequestState] = {}
        # By tick. Who has left or is due at another tick by now stays in the list, and is passed over.
        self._due: defaultdict[int, list[RequestState]] = defaultdict(list)
        self._numbers: tuple[int, ...] = ()
        self._states: tuple[RequestState, ...] = ()
        self._changed = False

    def __len__(self) -> int:
        """How many take part."""
        return len(self._active)

    def members(self) -> tuple[tuple[int, ...], tuple[RequestState, ...]]:
        """Who takes part, as sequence numbers and as requests; the same objects as long as these are the same."""
        if self._changed:
            self._changed = False
            numbers = tuple(self._active)
            if numbers != self._numbers:
                self._numbers = numbers
                self._states = tuple(self._active.values())
        return self._numbers, self._states

    def join(self, state: RequestState) -> None:
        """Take part from the next tick on."""
        self._active[state.sequence] = state
        self._changed = True
        state.start_clock()
        self.file(state)

    def leave(self, state: RequestState) -> None:
        """Take part no longer, and be held no longer; nothing happens to one that did neither."""
        if self._active.pop(state.sequence, None) is not None:
            self._changed = True
            state.stop_clock()
        else:
            self._held.pop(state.sequence, None)

    def limit(self, room: int) -> None:
        """Hold back all but the `room` that joined first; where there is room again, the oldest held join."""
        if len(self._active) > room:
            for number, state in list(self._active.items())[room:]:
                self.leave(state)
                self._held[number] = state
        elif self._held:
            for number in sorted(self._held)[: room - len(self._active)]:
                self.join(self._held.pop(number))

    def file(self, state: RequestState) -> None:
        """Note when the sequence is due; to be called when it has got blocks."""
        state.due = min(state.ends_at, state.full_at)
        self._due[state.due].append(state)

    def due(self, tick: int) -> list[RequestState]:
        """Who is due, oldest admission first. Each must leave or get a block before the clock passes the tick."""
        return sorted((state for state in self._due.get(tick, ()) if state.due == tick), key=_by_number)

    def advance(self, ticks: int) -> None:
        """Let the clock go on: all who take part gain so many tokens."""
        for _ in range(ticks):
            self._due.pop(self._clock.ticks, None)
            self._clock.ticks += 1

    def check(self, running: dict[int, RequestState]) -> None:
        """Raise AssertionError when the books disagree."""
        assert not self._active.keys() & self._held.keys(), "a sequence takes part and is held back"
        for number, state in [*self._active.items(), *self._held.items()]:
            assert running.get(number) is state, "a sequence that does not run is to decode"
            assert state.computed >= state.known, "a sequence decodes in its prompt"
        for number, state in self._active.items():
            assert state.due == min(state.ends_at, state.full_at) >= self._clock.ticks, f"{number} is overdue"
            assert state in self._due[state.due], "a sequence is not filed"
        assert all(state.due < 0 for state in self._held.values()), "a sequence is held back and due"
        assert all(tick >= self._clock.ticks for tick in self._due), "a tick was passed over"


def _by_number(state: RequestState) -> int:
    return state.sequence
