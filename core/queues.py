"""Where each request is: waiting or running, with which blocks; and what the runner is still to be told of it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from engine.core.kv_cache import BlockManager
from engine.core.sequence import RequestState, StateView
from engine.core.types import NewSequence


class Queues:
    """Moves requests between waiting and running, and keeps blocks and the runner's knowledge in step with that.

    waiting: in order of arrival, preempted ones included. running: by sequence number, oldest admission first.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.running: dict[int, RequestState] = {}
        self._draining: dict[int, RequestState] = {}  # preempted, with results of the old number under way
        self._sequences = 0
        self._waiting_views: tuple[StateView, ...] | None = ()  # None: to be made anew
        self._running_views: tuple[StateView, ...] | None = ()
        # What the runner has not been told yet:
        self._new: dict[int, NewSequence] = {}
        self._new_blocks: dict[int, list[int]] = {}
        self._finished: list[int] = []

    @property
    def waiting_views(self) -> tuple[StateView, ...]:
        """What a policy sees of the waiting requests."""
        if self._waiting_views is None:
            self._waiting_views = tuple(state.view for state in self.waiting)
        return self._waiting_views

    @property
    def running_views(self) -> tuple[StateView, ...]:
        """What a policy sees of the running requests."""
        if self._running_views is None:
            self._running_views = tuple(state.view for state in self.running.values())
        return self._running_views

    def find(self, sequence: int) -> RequestState | None:
        """The request that runs, or ran before its preemption, under this number; None once it has ended."""
        return self.running.get(sequence) or self._draining.get(sequence)

    def settled(self) -> Iterator[RequestState]:
        """Running requests that the runner knows already."""
        return (state for number, state in self.running.items() if number not in self._new)

    def add(self, state: RequestState) -> None:
        """A new request waits."""
        self.requests[state.request.id] = state
        self._wait(state)

    def start(self, state: RequestState, cached: Sequence[int]) -> None:
        """A waiting request runs, with blocks for all its known tokens, the first of them `cached`; there is room."""
        self._sequences += 1
        number = self._sequences
        blocks = self.blocks.allocate(number, len(state.tokens), cached)
        assert blocks is not None, "started without room"
        page_size = self.blocks.page_size
        state.admit(number, len(cached) * page_size, len(blocks) * page_size)
        self.waiting.remove(state)
        self.running[number] = state
        self._waiting_views = self._running_views = None
        self._new[number] = NewSequence(
            sequence=number, tokens=tuple(state.tokens), prompt_len=state.prompt_len, params=state.params
        )
        self._new_blocks[number] = blocks

    def extend(self, state: RequestState, num_tokens: int) -> bool:
        """Let a running request's blocks hold `num_tokens`; False, with nothing changed, if there are not enough."""
        added = self.blocks.extend(state.sequence, num_tokens)
        if added:
            self._new_blocks.setdefault(state.sequence, []).extend(added)
            state.capacity += len(added) * self.blocks.page_size
        return added is not None

    def preempt(self, state: RequestState) -> None:
        """A running request waits again. Tokens under way still count; `find` knows it until they are in."""
        if state.in_flight:
            self._draining[state.sequence] = state
        self._release(state)
        state.leave()
        self._wait(state)

    def drained(self, sequence: int) -> None:
        """The last result of a preempted request's old number is in."""
        del self._draining[sequence]

    def remove(self, state: RequestState) -> None:
        """The request has ended, wherever it was."""
        del self.requests[state.request.id]
        if state.sequence:
            self._release(state)
            return
        self.waiting.remove(state)
        self._waiting_views = None
        if state.in_flight:
            self._draining = {number: other for number, other in self._draining.items() if other is not state}

    def take_news(
        self,
    ) -> tuple[tuple[NewSequence, ...], tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
        """What has changed since the last call: Step.new, Step.blocks and Step.finished."""
        news = (
            tuple(self._new.values()),
            tuple((number, tuple(added)) for number, added in self._new_blocks.items()),
            tuple(self._finished),
        )
        self._new.clear()
        self._new_blocks.clear()
        self._finished.clear()
        return news

    def check(self) -> None:
        """Raise AssertionError when the books disagree."""
        self.blocks.check()
        states = set(self.requests.values())
        assert states == {*self.waiting, *self.running.values()}, "a request is lost"
        assert len(states) == len(self.waiting) + len(self.running), "a request is in two queues"
        assert self.waiting == sorted(self.waiting, key=_by_arrival), "the waiting are out of order"
        assert not any(state.sequence for state in self.waiting), "a waiting request has a number"
        for number, state in self.running.items():
            assert state.sequence == number, "a running request has another's number"
            capacity = len(self.blocks.table(number)) * self.blocks.page_size
            assert capacity == state.capacity >= state.computed, "a running request has too few blocks"
        if not self.running:
            assert self.blocks.num_used == 0, "blocks are in use by nobody"
        if not any(state.in_flight for state in states):
            assert not self._draining, "a result is awaited that never comes"

    def _wait(self, state: RequestState) -> None:
        insort(self.waiting, state, key=_by_arrival)
        self._waiting_views = None

    def _release(self, state: RequestState) -> None:
        """Take the blocks from a running request; the runner is to forget it, if it knows of it."""
        number = state.sequence
        self.blocks.free(number)
        del self.running[number]
        self._running_views = None
        self._new_blocks.pop(number, None)
        if self._new.pop(number, None) is None:
            self._finished.append(number)


def _by_arrival(state: RequestState) -> tuple[float, int]:
    return state.order
