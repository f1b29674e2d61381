"""Where each request is: waiting or running, with which blocks; and what the runner is still to be told of it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.request_state import RequestState, StateView
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import NewSequence


class Queues:
    """Moves requests between waiting and running, and keeps blocks and the runner's knowledge in step with that.

    waiting: in order of arrival, preempted ones included. running: by sequence number, oldest admission first. A
    running request is in its prompt (prefilling, in the order in which they get tokens) or past it (decoding), until
    all its tokens are planned; then it keeps its seat, and its blocks, until their results are in.
    """

    def __init__(self, blocks: BlockManager, clock: StepCounter) -> None:
        self.blocks = blocks
        self.decoding = DecodeSet(clock)
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
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

    def settled(self) -> Iterator[RequestState]:
        """Running requests that the runner knows already."""
        return (state for number, state in self.running.items() if number not in self._new)

    def add(self, state: RequestState) -> None:
        """A new request waits."""
        self.requests[state.id] = state
        self._wait(state)

    def start(self, state: RequestState, cached: Sequence[int]) -> None:
        """A waiting request runs, with blocks for all its known tokens, the first of them `cached`; there is room."""
        self._sequences += 1
        number = self._sequences
        blocks = self.blocks.allocate(number, len(state.tokens), cached)
        assert blocks is not None, "started without room"
        block_size = self.blocks.block_size
        state.admit(number, len(cached) * block_size, len(blocks) * block_size)
        self.waiting.remove(state)
        self.running[number] = self.prefilling[number] = state
        self._waiting_views = self._running_views = None
        self._new[number] = NewSequence(
            sequence=number, tokens=tuple(state.tokens), prompt_len=state.prompt_len, params=state.params
        )
        self._new_blocks[number] = blocks

    def put_behind(self, states: Iterable[RequestState]) -> None:
        """Let requests in their prompts get tokens after all the others."""
        for state in states:
            self.prefilling[state.sequence] = self.prefilling.pop(state.sequence)

    def prefilled(self, state: RequestState) -> None:
        """The last chunk of a request's known tokens is planned: from now on it decodes."""
        del self.prefilling[state.sequence]
        self.decoding.join(state)

    def extend(self, state: RequestState) -> bool:
        """One more block for a request that decodes; False, with nothing changed, if there is none."""
        added = self.blocks.extend(state.sequence, state.capacity + 1)
        if added is None:
            return False
        self._new_blocks.setdefault(state.sequence, []).extend(added)
        state.capacity += self.blocks.block_size
        self.decoding.file(state)
        return True

    def preempt(self, state: RequestState) -> None:
        """A running request waits again. Tokens under way still count."""
        self._release(state)
        state.leave()
        self._wait(state)

    def remove(self, state: RequestState) -> None:
        """The request has ended, wherever it was."""
        del self.requests[state.id]
        if state.sequence:
            self._release(state)
        else:
            self.waiting.remove(state)
            self._waiting_views = None
        state.end()

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
            capacity = len(self.blocks.table(number)) * self.blocks.block_size
            assert capacity == state.capacity >= state.computed, "a running request has too few blocks"
        for number, state in self.prefilling.items():
            assert self.running.get(number) is state, "a request that does not run is in its prompt"
            assert state.computed < state.known, "a request past its prompt is in it"
        self.decoding.check(self.running)
        if not self.running:
            assert self.blocks.num_used == 0, "blocks are in use by nobody"

    def _wait(self, state: RequestState) -> None:
        insort(self.waiting, state, key=_by_arrival)
        self._waiting_views = None

    def _release(self, state: RequestState) -> None:
        """Take the blocks from a running request; the runner is to forget it, if it knows of it."""
        number = state.sequence
        self.blocks.free(number)
        self.prefilling.pop(number, None)
        self.decoding.leave(state)
        del self.running[number]
        self._running_views = None
        self._new_blocks.pop(number, None)
        if self._new.pop(number, None) is None:
            self._finished.append(number)


def _by_arrival(state: RequestState) -> tuple[float, int]:
    return state.order
