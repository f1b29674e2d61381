"""The block manager under any sequence of operations: no leak, no double use, only equal prefixes are shared."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.hash_chain import HashChain

BLOCK_SIZE = 2


class Sequence:
    """A test's own record of one sequence: its tokens, of which it has passed the first `computed`."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.tokens = tokens
        self.salt = salt
        self.prefill_len = len(tokens)
        self.computed = 0
        self.chain = HashChain(BLOCK_SIZE, salt)

    def context(self, position: int) -> tuple[str, tuple[int, ...]]:
        """What must be written at a position: salt and all tokens up to it."""
        return self.salt, tuple(self.tokens[: position + 1])

    def content(self, block: int) -> tuple[str, tuple[int, ...]]:
        """The content that a block of the sequence must have: salt and all tokens up to the end of the block."""
        return self.salt, tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 9), prefix_caching=st.booleans())
    def begin(self, num_blocks: int, prefix_caching: bool) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.sequences: dict[int, Sequence] = {}
        self.written: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}  # by block and offset: salt and context
        self.next = 0
        self.resets = 0
        self.began: dict[int, int] = {}
        """By sequence, how often prefixes had been forgotten when it began."""
        self.taken: dict[int, int] = {}
        """By block, the same when a sequence took the block; -1 if that sequence had begun before."""

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "a"]),
        pending=st.booleans(),
        data=st.data(),
    )
    def allocate(self, tokens: list[int], salt: str, pending: bool, data: st.DataObject) -> None:
        """Add a sequence with the blocks of its prefix, which may be computed or not; others may leave meanwhile."""
        sequence = Sequence(tokens, salt)
        cached = self.manager.lookup(tokens, sequence.chain)
        assert len(cached) * BLOCK_SIZE < len(tokens)
        assert all(self.taken[block] == self.resets for block in cached), "a forgotten block is found"
        leaving = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True)) if self.sequences else []
        with self.manager.held(cached):
            for number in leaving:
                self.free_one(number)
            possible = self.add(sequence, cached)
        if possible and pending:
            self.manager.index_pending(self.next - 1, tokens, sequence.chain)

    def add(self, sequence: Sequence, cached: list[int]) -> bool:
        tokens = sequence.tokens
        possible = self.manager.can_allocate(len(tokens), cached)
        blocks = self.manager.allocate(self.next, len(tokens), cached)
        assert (blocks is not None) == possible
        if blocks is not None:
            assert blocks[: len(cached)] == cached
            assert len(blocks) == self.manager.blocks_for(len(tokens))
            for block in blocks[len(cached) :]:
                self.taken[block] = self.resets
                for offset in range(BLOCK_SIZE):
                    self.written.pop((block, offset), None)
            self.sequences[self.next] = sequence
            self.began[self.next] = self.resets
            self.next += 1
        return possible

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[number]
        before, available = self.manager.table(number), self.manager.num_available
        added = self.manager.extend(number, len(sequence.tokens) + len(tokens))
        wanted = self.manager.blocks_for(len(sequence.tokens) + len(tokens)) - len(before)
        if added is None:
            assert wanted > available
            assert self.manager.table(number) == before
        else:
            assert len(added) == wanted
            assert self.manager.table(number) == (*before, *added)
            sequence.tokens += tokens
            for block in added:
                self.taken[block] = -1 if self.began[number] < self.resets else self.resets
                for offset in range(BLOCK_SIZE):
                    self.written.pop((block, offset), None)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 9))
    def draft(self, data: st.DataObject, count: int) -> None:
        """Give a sequence blocks for drafts, and take them back."""
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        before, length = self.manager.table(number), len(self.sequences[number].tokens)
        self.manager.updates.clear()
        added = self.manager.extend(number, length + count)
        for block in added or ():
            self.taken[block] = -1 if self.began[number] < self.resets else self.resets
            for offset in range(BLOCK_SIZE):
                self.written.pop((block, offset), None)
        self.manager.updates.clear()
        self.manager.shrink(number, length)
        assert self.manager.table(number) == before[: self.manager.blocks_for(length)]
        assert self.manager.updates == ({number: [-len(before)]} if added else {})

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 6), undo=st.booleans())
    def compute(self, data: st.DataObject, count: int, undo: bool) -> None:
        """Compute a chunk of what a sequence began with, or one more of its tokens."""
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence, manager = self.sequences[number], self.manager
        table = manager.table(number)
        if sequence.computed >= sequence.prefill_len:  # decode
            start, count = sequence.computed, int(sequence.computed < len(sequence.tokens))
        else:
            wanted, end = count, sequence.prefill_len
            start, count = manager.claim(number, sequence.computed, end, wanted)
            assert 0 < count <= wanted
            assert sequence.computed <= start
            assert start + count <= end
            shared = any(table[at // BLOCK_SIZE] in manager.table(other) for at in range(start, start + count)
                         for other in self.sequences if other != number)  # fmt: skip
            assert manager.shares(number, start, count) == shared
            if undo:
                manager.return_claim(number, start, count)
                assert manager.claim(number, sequence.computed, end, wanted) == (start, count)
        for position in range(start):
            assert self.written[table[position // BLOCK_SIZE], position % BLOCK_SIZE] == sequence.context(position)
        for position in range(start, start + count):
            cell = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            assert cell not in self.written, "a position is computed twice"
            self.written[cell] = sequence.context(position)
        sequence.computed = start + count
        manager.register(number, sequence.tokens, sequence.chain, sequence.computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        self.free_one(number)

    def free_one(self, number: int) -> None:
        del self.sequences[number]
        self.manager.free(number)

    @rule()
    def forget_prefixes(self) -> None:
        free, cached = self.manager.num_free, self.manager.num_cached
        assert self.manager.forget_prefixes() == cached
        assert (self.manager.num_free, self.manager.num_cached) == (free + cached, 0)
        self.resets += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def predict(self, data: st.DataObject, num_tokens: int) -> None:
        """A shortage predicts what it will be once other sequences are freed."""
        leaving = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True))
        prompt = data.draw(st.sampled_from(list(self.sequences.values())))
        cached = self.manager.lookup(prompt.tokens, prompt.chain)
        num_tokens += len(cached) * BLOCK_SIZE
        predicted = self.manager.shortage(num_tokens, cached)
        for number in leaving:
            predicted.release(number)
        with self.manager.held(cached):
            for number in leaving:
                self.free_one(number)
            assert self.manager.shortage(num_tokens, cached).blocks == predicted.blocks

    @invariant()
    def whole(self) -> None:
        manager = self.manager
        manager.check()
        assert manager.num_free + manager.num_cached + manager.num_used == manager.num_blocks
        if not self.sequences:
            assert manager.num_used == 0

    @invariant()
    def shared_only_where_equal(self) -> None:
        owner: dict[int, tuple[str, tuple[int, ...]]] = {}
        for number, sequence in self.sequences.items():
            for index, block in enumerate(self.manager.table(number)):
                content = sequence.content(index)
                assert owner.setdefault(block, content) == content
            for position in range(sequence.computed):
                cell = self.manager.table(number)[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert self.written[cell] == sequence.context(position), "a block was overwritten while in use"


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
