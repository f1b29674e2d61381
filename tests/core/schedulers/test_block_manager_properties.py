"""The block manager under any sequence of operations: no leak, no double use, only equal prefixes are shared."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.schedulers.block_manager import BlockManager, HashChain

BLOCK_SIZE = 2


class Sequence:
    """A test's own record of one sequence: its tokens, of which the first `computed` are in the KV cache."""

    def __init__(self, tokens: list[int], salt: str, cached: int) -> None:
        self.tokens = tokens
        self.salt = salt
        self.computed = cached
        self.chain = HashChain(BLOCK_SIZE, salt)

    def content(self, block: int) -> tuple[str, tuple[int, ...]]:
        """The content that a block of the sequence must have: salt and all tokens up to the end of the block."""
        return self.salt, tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 9), prefix_caching=st.booleans())
    def begin(self, num_blocks: int, prefix_caching: bool) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.sequences: dict[int, Sequence] = {}
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # of fully written blocks
        self.next = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "a"]))
    def allocate(self, tokens: list[int], salt: str) -> None:
        sequence = Sequence(tokens, salt, 0)
        cached = self.manager.lookup(tokens, sequence.chain)
        assert len(cached) * BLOCK_SIZE < len(tokens)
        for index, block in enumerate(cached):
            assert self.content[block] == sequence.content(index)
        possible = self.manager.can_allocate(len(tokens), cached)
        blocks = self.manager.allocate(self.next, len(tokens), cached)
        assert (blocks is not None) == possible
        if blocks is not None:
            assert blocks[: len(cached)] == cached
            assert len(blocks) == self.manager.blocks_for(len(tokens))
            sequence.computed = len(cached) * BLOCK_SIZE
            self.sequences[self.next] = sequence
            self.next += 1

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

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 6), register=st.booleans())
    def compute(self, data: st.DataObject, count: int, register: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[number]
        table = self.manager.table(number)
        for position in range(sequence.computed, min(sequence.computed + count, len(sequence.tokens))):
            block = table[position // BLOCK_SIZE]
            others = [other for other in self.sequences if other != number and block in self.manager.table(other)]
            assert not others, "a block of another sequence is written"
            self.content.pop(block, None)
            if position % BLOCK_SIZE == BLOCK_SIZE - 1:
                self.content[block] = sequence.content(position // BLOCK_SIZE)
            sequence.computed = position + 1
        if register:
            self.manager.register(number, sequence.tokens, sequence.chain, sequence.computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        del self.sequences[number]
        self.manager.free(number)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 20), spare=st.integers(0, 2))
    def predict(self, data: st.DataObject, num_tokens: int, spare: int) -> None:
        """can_allocate(without=...) predicts what can_allocate answers once those sequences are freed."""
        leaving = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True))
        prompt = data.draw(st.sampled_from(list(self.sequences.values())))
        cached = self.manager.lookup(prompt.tokens, prompt.chain)
        num_tokens += len(cached) * BLOCK_SIZE
        predicted = self.manager.can_allocate(num_tokens, cached, spare=spare, without=leaving)
        for number in leaving:
            del self.sequences[number]
            self.manager.free(number)
        assert self.manager.can_allocate(num_tokens, cached, spare=spare) == predicted

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
                if (index + 1) * BLOCK_SIZE <= sequence.computed:
                    assert self.content[block] == content, "a block was overwritten while in use"


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
