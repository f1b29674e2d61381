"""The decoding sequences, indexed by their next event: the iteration at which a sequence's blocks are full
or all its output is planned. Planning a step touches only the sequences with an event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from engine.core.profiling.context_sums import ContextSums
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter


class DecodeSet:
    """Sequences that decode: active ones are in every step; deferred ones wait for the policy to allow more decodes.

    Active sequences advance implicitly: each gains one token per iteration, computed from the shared step counter.
    Accepted drafts are tokens in addition to that (`accept_drafts`). A sequence's next event
    (`RequestState.next_event`) is the iteration at which this ends, because all its output tokens are planned or its
    blocks are full. While no sequence is added, removed, has an event or drafts, the cost of planning a step does not
    depend on the number of active sequences.
    """

    def __init__(self, counter: StepCounter, contexts: ContextSums | None = None) -> None:
        """contexts: sums over the active sequences, kept up to date; None: no sums."""
        self._counter = counter
        self._contexts = contexts
        self._active: dict[int, RequestState] = {}  # by sequence number, in batch order
        self._deferred: dict[int, RequestState] = {}
        # By iteration. Entries stay when a sequence is removed or rescheduled; `events_at` skips them.
        self._events: defaultdict[int, list[RequestState]] = defaultdict(list)
        self._numbers: tuple[int, ...] = ()
        self._states: tuple[RequestState, ...] = ()
        self._changed = False

    def __len__(self) -> int:
        """Number of active sequences."""
        return len(self._active)

    def members(self, excluding: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[RequestState, ...]]:
        """The active sequences but those of the numbers `excluding`, as numbers and as requests.

        Returns the tuple objects of the last call if the sequences are the same.
        """
        if self._changed or excluding:
            self._changed = bool(excluding)
            numbers = tuple([number for number in self._active if number not in excluding])
            if numbers != self._numbers:
                self._numbers = numbers
                self._states = tuple([self._active[number] for number in numbers])
        return self._numbers, self._states

    def active(self) -> Collection[RequestState]:
        """The active sequences, in batch order."""
        return self._active.values()

    def add(self, state: RequestState) -> None:
        """Make a sequence active from the next iteration on."""
        self._active[state.sequence] = state
        self._changed = True
        state.start_decoding()
        if self._contexts is not None:
            self._contexts.add(state.context_offset)
        self.schedule_event(state)

    def remove(self, state: RequestState) -> None:
        """Remove a sequence, active or deferred; a no-op if it is neither."""
        if self._active.pop(state.sequence, None) is not None:
            self._changed = True
            if self._contexts is not None:
                self._contexts.remove(state.context_offset)
            state.stop_decoding()
        else:
            self._deferred.pop(state.sequence, None)

    def limit(self, max_active: int) -> None:
        """Defer all but the first `max_active` active sequences, or reactivate deferred ones, oldest first."""
        if len(self._active) > max_active:
            for number, state in list(self._active.items())[max_active:]:
                self.remove(state)
                self._deferred[number] = state
        elif self._deferred:
            for number in sorted(self._deferred)[: max_active - len(self._active)]:
                self.add(self._deferred.pop(number))

    def schedule_event(self, state: RequestState) -> None:
        """Set and index the sequence's next event; to be called whenever it has got blocks."""
        self._events[state.find_next_event()].append(state)

    def accept_drafts(self, accepted: Sequence[tuple[RequestState, int]]) -> None:
        """Advance active sequences by the drafts accepted in the step just committed, beyond the step's iteration."""
        if self._contexts is not None:
            self._contexts.advance([(state.context_offset, count) for state, count in accepted])
        events = self._events
        for state, count in accepted:
            events[state.accept_drafts(count)].append(state)

    def events_at(self, iteration: int) -> list[RequestState]:
        """Sequences whose next event is at `iteration`, oldest admission first.

        Each must be removed or get a block before the counter passes `iteration`.
        """
        # A sequence whose event was moved may be listed twice.
        found = {state for state in self._events.get(iteration, ()) if state.next_event == iteration}
        return sorted(found, key=_by_number)

    def advance(self, iterations: int) -> None:
        """Advance the step counter: every active sequence gains `iterations` tokens."""
        for _ in range(iterations):
            self._events.pop(self._counter.iterations, None)
            self._counter.iterations += 1

    def check(self, running: dict[int, RequestState]) -> None:
        """Raise AssertionError if an invariant is violated."""
        now = self._counter.iterations
        assert not self._active.keys() & self._deferred.keys(), "a sequence is both active and deferred"
        for number, state in [*self._active.items(), *self._deferred.items()]:
            assert running.get(number) is state, "a sequence decodes but does not run"
            assert state.computed >= state.prefill_len, "a sequence decodes before its prefill is complete"
        if self._contexts is not None:
            assert len(self._contexts) == len(self._active), "the sums of contexts are of other sequences"
        for number, state in self._active.items():
            assert state.next_event == min(state.output_planned_at, state.blocks_full_at), f"{number}: wrong next event"
            assert state.next_event >= now, f"{number}: missed its event"
            assert state in self._events[state.next_event], "an event is not indexed"
        assert all(state.next_event < 0 for state in self._deferred.values()), "a deferred sequence has an event"
        assert all(iteration >= now for iteration in self._events), "an iteration with events was skipped"


def _by_number(state: RequestState) -> int:
    return state.sequence
