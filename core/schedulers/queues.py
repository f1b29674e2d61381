"""The waiting and the running requests, their blocks, and what changed since the runner's last step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from engine.core.profiling.context_sums import ContextSums
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.request_state import RequestState, StateView
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import NewSequence


class Queues:
    """Moves requests between waiting and running, and allocates and frees their blocks accordingly.

    waiting: in order of arrival, including preempted requests. running: by sequence number, oldest admission first. A
    running request first prefills (`prefilling`, in the order in which prefill chunks are planned) and then decodes
    (`decoding`) until all its output tokens are planned. It keeps running, and keeps its blocks, until their results
    are committed.
    """

    def __init__(self, blocks: BlockManager, counter: StepCounter, contexts: ContextSums | None = None) -> None:
        """contexts: as in DecodeSet."""
        self.blocks = blocks
        self.decoding = DecodeSet(counter, contexts)
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self._last_sequence = 0
        self._waiting_views: tuple[StateView, ...] | None = ()  # None: outdated
        self._running_views: tuple[StateView, ...] | None = ()
        # Not sent to the runner yet:
        self._new: dict[int, NewSequence] = {}
        self._finished: list[int] = []

    @property
    def waiting_views(self) -> tuple[StateView, ...]:
        """The waiting requests, as a policy sees them."""
        if self._waiting_views is None:
            self._waiting_views = tuple(state.view for state in self.waiting)
        return self._waiting_views

    @property
    def running_views(self) -> tuple[StateView, ...]:
        """The running requests, as a policy sees them."""
        if self._running_views is None:
            self._running_views = tuple(state.view for state in self.running.values())
        return self._running_views

    @property
    def num_new(self) -> int:
        """Running requests that are admitted in the step being planned."""
        return len(self._new)

    def admitted_earlier(self) -> Iterator[RequestState]:
        """Running requests that were admitted before the step being planned."""
        return (state for number, state in self.running.items() if number not in self._new)

    def forget(self, sequences: Iterable[int]) -> None:
        """Have the next step report these sequences, which belong to no request, to the runner as finished."""
        self._finished.extend(sequences)

    def add(self, state: RequestState) -> None:
        """Queue a new request."""
        self.requests[state.id] = state
        self._enqueue(state)

    def admit(self, state: RequestState, cached: Sequence[int]) -> None:
        """Move a waiting request to running, with blocks for all its known tokens, of which `cached` come first.

        There must be enough blocks.
        """
        self._last_sequence += 1
        number = self._last_sequence
        blocks = self.blocks.allocate(number, len(state.tokens), cached)
        assert blocks is not None, "admitted without enough blocks"
        if not state.wants_prompt_logprobs:  # else it must compute all its tokens itself
            self.blocks.index_pending(number, state.tokens, state.chain)
        state.admit(number, self.blocks.capacity(number))
        self._dequeue(state)
        self.running[number] = self.prefilling[number] = state
        self._running_views = None
        self._new[number] = NewSequence(
            sequence=number, tokens=state.tokens.known(), prompt_len=state.prompt_len, params=state.params
        )

    def move_to_prefill_end(self, states: Iterable[RequestState]) -> None:
        """Plan the chunks of these prefilling requests after those of all others, from the next step on."""
        for state in states:
            self.prefilling[state.sequence] = self.prefilling.pop(state.sequence)

    def start_decoding(self, state: RequestState) -> None:
        """Move a request from prefilling to decoding: the last chunk of its known tokens is planned."""
        del self.prefilling[state.sequence]
        self.decoding.add(state)

    def add_block(self, state: RequestState) -> bool:
        """Give a decoding request one more block; False, with nothing changed, if none is available."""
        if self.blocks.extend(state.sequence, state.capacity + 1) is None:
            return False
        state.capacity += self.blocks.block_size
        self.decoding.schedule_event(state)
        return True

    def preempt(self, state: RequestState) -> None:
        """Move a running request back to waiting. Tokens of steps in flight still count."""
        self._release(state)
        state.preempt()
        self._enqueue(state)

    def retire(self, state: RequestState) -> None:
        """Remove a request that has finished, waiting or running, and free its blocks (BlockManager.free)."""
        del self.requests[state.id]
        if state.sequence:
            self._release(state)
        else:
            self._dequeue(state)
        state.finish()

    def take_runner_updates(
        self,
    ) -> tuple[tuple[NewSequence, ...], tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
        """What changed since the last call and the runner does not know: Step.new, Step.blocks and Step.finished."""
        updates = (
            tuple(self._new.values()),
            tuple((number, tuple(added)) for number, added in self.blocks.updates.items()),
            tuple(self._finished),
        )
        self._new.clear()
        self.blocks.updates.clear()
        self._finished.clear()
        return updates

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self.blocks.check()
        states = set(self.requests.values())
        assert states == {*self.waiting, *self.running.values()}, "a request is neither waiting nor running"
        assert len(states) == len(self.waiting) + len(self.running), "a request is both waiting and running"
        assert self.waiting == sorted(self.waiting, key=_by_arrival), "the waiting requests are out of order"
        assert not any(state.sequence for state in self.waiting), "a waiting request has a sequence number"
        for number, state in self.running.items():
            assert state.sequence == number, "a running request is filed under another sequence number"
            capacity = self.blocks.capacity(number)
            assert capacity == state.capacity >= state.computed, "a running request has too few blocks"
        for number, state in self.prefilling.items():
            assert self.running.get(number) is state, "a request prefills but does not run"
            assert state.computed < state.prefill_len, "a request prefills but its prefill is complete"
        self.decoding.check(self.running)
        if not self.running:
            assert self.blocks.num_used == 0, "blocks are in use but no request runs"

    def _enqueue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=_by_arrival)
        self._waiting_views = None

    def _dequeue(self, state: RequestState) -> None:
        del self.waiting[bisect_left(self.waiting, state.arrival_order, key=_by_arrival)]
        self._waiting_views = None

    def _release(self, state: RequestState) -> None:
        """Free a running request's blocks, and have the runner forget the sequence if the runner knows it."""
        number = state.sequence
        self.blocks.free(number)
        self.prefilling.pop(number, None)
        self.decoding.remove(state)
        del self.running[number]
        self._running_views = None
        if self._new.pop(number, None) is None:
            self._finished.append(number)


def _by_arrival(state: RequestState) -> tuple[float, int]:
    return state.arrival_order
