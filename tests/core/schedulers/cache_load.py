"""Drives a scheduler with random requests under a fake clock, and records what happens to the entries of its cache.

The record is made by wrapping the block manager's methods, so that it does not depend on the observers under test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from attrs import evolve

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.cache_metrics import CacheMetrics
from engine.core.schedulers.cache_observer import CacheObserver, join_observers
from engine.core.schedulers.grouped_block_manager import GroupedBlockManager
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.kind_tables import KindTable
from engine.core.schedulers.make_block_manager import make_block_manager
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import FULL, NO_TOKEN, BlockKind, Request, SamplingParams, Step, StepResult

from .scheduling import Policy, cache_info

BLOCK_SIZE = 2
MAX_LEN = 24
SALTS = ("", "", "a", "secret")


def window(size: int, groups: int = 1) -> BlockKind:
    return BlockKind(name=f"window {size}", window=size, groups=groups)


LAYOUTS = {
    "full": (FULL,),
    "full in two groups": (evolve(FULL, groups=2),),
    "full and window": (FULL, window(3)),
    "window": (window(4),),
    "full in two groups, windows in three": (evolve(FULL, groups=2), window(5, groups=3)),
    "latent, full and two windows": (FULL, evolve(FULL, name="latent"), window(2), window(7)),
}


class Record(NamedTuple):
    """What happened to one entry."""

    time: float
    what: str
    """allocated, reused or evicted."""
    entry: int


class Clock:
    """Seconds that pass only when a test says so; sums of them are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CacheLoad:
    """A scheduler, the requests it has had, and the record of its cache."""

    def __init__(
        self,
        layout: Sequence[BlockKind],
        seed: int,
        *,
        num_blocks: int,
        observers: Sequence[CacheObserver] = (),
        metrics: CacheMetrics | None = None,
        clock: Clock | None = None,
        prefix_caching: bool = True,
        steps_ahead: int = 1,
    ) -> None:
        self.random = Random(seed)
        self.clock = clock or Clock()
        self.kinds = layout
        num_blocks *= sum(kind.groups for kind in layout)
        self.blocks = make_block_manager(
            cache_info(num_blocks=num_blocks, block_size=BLOCK_SIZE, kinds=tuple(layout)),
            max_chunk=8,
            prefix_caching=prefix_caching,
            observer=join_observers([*observers, *([metrics] if metrics is not None else [])]),
        )
        self.scheduler = Scheduler(
            Policy(),
            self.blocks,
            max_batch_tokens=8,
            max_running=4,
            max_len=MAX_LEN,
            eos_tokens=frozenset(),
            cache_metrics=metrics,
        )
        self.steps_ahead = steps_ahead
        self.record: list[Record] = []
        self.states: list[RequestState] = []
        self.prefill_len: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self._in_flight: deque[tuple[Step, StepResult]] = deque()
        _wrap(self.blocks, self._note)

    def run(self, operations: int) -> Iterator[None]:
        """Do something random this many times, and yield after each."""
        for _ in range(operations):
            self.clock.now += self.random.choice((0.0, 0.0, 2**-10, 0.5, 7.0, 900.0))
            {
                0: self.add,
                1: self.abort,
                2: self.reset if self.random.random() < 0.1 else self.add,
            }.get(self.random.randrange(9), self.turn)()
            self.scheduler.check()
            yield

    def add(self) -> None:
        """Add a request, whose prompt begins like those of others."""
        prompt = [self.random.randrange(2) for _ in range(self.random.randint(1, 6))]
        if self.states and self.random.random() < 0.8:
            known = self.states[self.random.randrange(min(3, len(self.states)))].tokens
            prompt = [*known[: self.random.randint(0, len(known))], *prompt][: MAX_LEN // 2]
        room = min(MAX_LEN, self.blocks.max_tokens + 1) - len(prompt)
        if room < 1:
            return
        request = Request(
            id=str(len(self.states)),
            prompt=tuple(prompt),
            params=SamplingParams(
                max_tokens=self.random.randint(1, min(room, 9)),
                prompt_logprobs=self.random.choice([*[None] * 4, 0]),
            ),
            arrival=self.clock.now,
            salt=self.random.choice(SALTS),
        )
        self.scheduler.add(request)
        self.states.append(self.scheduler._queues.requests[request.id])

    def abort(self) -> None:
        """Abort a request."""
        if live := self.scheduler.requests():
            self.scheduler.abort(self.random.choice(live))

    def reset(self) -> None:
        """Empty the prefix cache."""
        self.scheduler.reset_prefix_cache()

    def turn(self) -> None:
        """Do what Engine.step does."""
        step = self.scheduler.schedule(self.clock.now)
        if step is not None:
            self.prefill_len.update((new.sequence, len(new.tokens)) for new in step.new)
            self.computed.update((chunk.sequence, chunk.start + chunk.count) for chunk in step.chunks)
            for sequence in step.decodes:
                self.computed[sequence] += step.iterations
            self._in_flight.append((step, self._answer(step)))
        if self._in_flight and not (step is not None and len(self._in_flight) <= self.steps_ahead):
            self.scheduler.commit(*self._in_flight.popleft(), self.clock.now)

    def indexed(self) -> set[tuple[int, bytes]]:
        """Kind and digest of each entry that can be found in the prefix cache."""
        if isinstance(self.blocks, GroupedBlockManager):
            return {(kind, digest) for kind, index in enumerate(self.blocks._indices) for digest in index}
        return {(0, digest) for digest in self.blocks._by_digest}

    def unreachable_slots(self) -> int:
        """Slots of cached entries of the kinds without a window of which an entry before is not indexed."""
        parents: dict[bytes, bytes | None] = {}
        for state in self.states:
            count = len(state.tokens) // BLOCK_SIZE
            digests = HashChain(BLOCK_SIZE, state.request.salt).first(state.tokens, count)
            parents.update(zip(digests, [None, *digests], strict=False))
        indexed, lost = self.indexed(), 0
        for entry in self.blocks._cached:
            kind = self.blocks._kind_of[entry] if isinstance(self.blocks, GroupedBlockManager) else 0
            digest = self.blocks._digests[entry]
            assert digest is not None
            at: bytes | None = digest
            while at is not None and (kind, at) in indexed:
                at = parents[at]
            lost += (at is not None and self.kinds[kind].window is None) * self.kinds[kind].groups * BLOCK_SIZE
        return lost

    def unfilled_slots(self) -> int:
        """Slots in the tables of running sequences behind their last known token."""
        unfilled = 0
        for sequence, state in self.scheduler._queues.running.items():
            known = max(self.prefill_len.get(sequence, len(state.tokens)), self.computed.get(sequence, 0))
            tables = [(0, self.blocks.table(sequence))]
            if isinstance(self.blocks, GroupedBlockManager):
                tables = self.blocks.tables(sequence)
            for kind, (first, table) in zip(self.kinds, tables, strict=True):
                for index in range(len(table)):
                    begin = (first + index // kind.groups) * BLOCK_SIZE
                    unfilled += sum(position >= known for position in range(begin, begin + BLOCK_SIZE))
        return unfilled

    def _answer(self, step: Step) -> StepResult:
        """A result of random tokens; a few times there is no token, as where the logits are not finite."""
        count = len(step.decodes) + sum(chunk.sample for chunk in step.chunks)
        row = tuple(NO_TOKEN if self.random.random() < 0.02 else self.random.randrange(2) for _ in range(count))
        return StepResult(step=step.id, tokens=(row,))

    def _note(self, what: str, *entries: int) -> None:
        self.record += [Record(self.clock.now, what, entry) for entry in entries]


def _wrap(blocks: BlockManager, note: Any) -> None:
    """Make a block manager note what it allocates, reuses and evicts."""
    allocate = blocks.allocate

    def noted_allocate(sequence: int, num_tokens: int, cached: Sequence[int] = ()) -> list[int] | None:
        if blocks.can_allocate(num_tokens, cached):
            note("reused", *cached)
        return allocate(sequence, num_tokens, cached)

    blocks.allocate = noted_allocate  # type: ignore[method-assign]
    if isinstance(blocks, GroupedBlockManager):
        take, grow = blocks._take, blocks._grow

        def noted_take() -> int:
            if not blocks._free:
                note("evicted", next(iter(blocks._cached)))
            return take()

        def noted_grow(sequence: int, kind: int, table: KindTable, end: int) -> list[int]:
            before = len(table.entries)
            added = grow(sequence, kind, table, end)
            note("allocated", *table.entries[before:])
            return added

        blocks._take = noted_take  # type: ignore[method-assign]
        blocks._grow = noted_grow  # type: ignore[method-assign]
    else:
        take_blocks = blocks._take_blocks

        def noted_take_blocks(count: int) -> list[int]:
            note("evicted", *islice(blocks._cached, max(count - len(blocks._free), 0)))
            taken = take_blocks(count)
            note("allocated", *taken)
            return taken

        blocks._take_blocks = noted_take_blocks  # type: ignore[method-assign]
