"""Allocates KV blocks to sequences where layers differ in what they keep of the context. Pure Python: no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.core.schedulers.block_kinds import MAX_INDICES, longest_context, span
from engine.core.schedulers.block_manager import NEVER, BlockManager
from engine.core.schedulers.cache_observer import CacheObserver
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.kind_tables import CachedPrefix, KindTable, SequenceTables
from engine.core.schedulers.shortage import GroupedShortage
from engine.core.types import BlockKind


class GroupedBlockManager(BlockManager):
    """Allocates blocks to sequences that have a block table per kind of layers; all kinds share the blocks.

    An index of a sequence's table of one kind holds an *entry*: as many blocks as the kind has groups, referenced,
    indexed and evicted together, and known by the number of the first.

    In a kind with a window, a sequence holds only the entries that its coming tokens attend to. When it decodes, it
    gives up those behind the window whenever it gets one more (`extend`). While it prefills, its table spans the window
    and the longest possible chunk, and moves on with each chunk (`slide`).

    A prefix is reused only up to a position where every kind has what the tokens behind it attend to: all entries, or
    those of the last window. Such a position need not exist before its tokens are computed. So, unlike in BlockManager,
    sequences share computed entries only, and a request waits while another computes its prefix (`awaits`).
    """

    slides = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        kinds: Sequence[BlockKind],
        *,
        max_chunk: int,
        prefix_caching: bool = True,
        observer: CacheObserver | None = None,
    ) -> None:
        """max_chunk: maximum tokens of a prefill chunk. observer: see BlockManager."""
        super().__init__(num_blocks, block_size, prefix_caching=prefix_caching, observer=observer)
        self.kinds = tuple(kinds)
        self.blocks_per_extension = sum(kind.groups for kind in kinds)
        self._windows = [(number, kind.window) for number, kind in enumerate(kinds) if kind.window is not None]
        self._full = [number for number, kind in enumerate(kinds) if kind.window is None]
        self._max_chunk = max_chunk
        self._spans = [span(kind.window, block_size, max_chunk) for kind in kinds]
        """Per kind, maximum entries of a table."""
        self._indices: list[dict[bytes, int]] = [{} for _ in kinds]
        self._blocks_of: list[tuple[int, ...]] = [()] * num_blocks
        self._kind_of = [0] * num_blocks
        self._sequences: dict[int, SequenceTables] = {}
        self._pending: Counter[bytes] = Counter()
        self._num_cached = 0
        self._used_by_kind = [0] * len(kinds)
        """Blocks of each kind in the block tables of sequences."""
        self._cached_by_kind = [0] * len(kinds)
        """Unused blocks of each kind kept in the prefix cache."""

    @property
    def max_tokens(self) -> int:
        return longest_context(self.kinds, self.num_blocks, self.block_size, self._max_chunk)

    @property
    def num_available(self) -> int:
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached

    def usage_by_kind(self) -> tuple[tuple[str, int, int], ...]:
        if len(self.kinds) < 2:
            return ()
        names = (kind.name for kind in self.kinds)
        return tuple(zip(names, self._used_by_kind, self._cached_by_kind, strict=True))

    def table(self, sequence: int) -> tuple[int, ...]:
        """The blocks of a sequence, of all kinds."""
        tables = self._sequences[sequence].tables
        return tuple(block for table in tables for entry in table.entries for block in self._blocks_of[entry])

    def tables(self, sequence: int) -> list[tuple[int, tuple[int, ...]]]:
        """Per kind, the index of the first entry of a sequence's table and the blocks from there on."""
        return [
            (table.first, tuple(block for entry in table.entries for block in self._blocks_of[entry]))
            for table in self._sequences[sequence].tables
        ]

    def num_held(self, sequence: int) -> int:
        tables = self._sequences[sequence].tables
        return sum(len(table.entries) * kind.groups for table, kind in zip(tables, self.kinds, strict=True))

    def capacity(self, sequence: int) -> int:
        if not self.kinds:  # of a model whose layers all keep a state: a decoding sequence needs no event
            return MAX_INDICES * self.block_size
        return self._sequences[sequence].length * self.block_size

    def unfilled_slots(self, sequence: int, num_tokens: int) -> int:
        size = self.block_size
        return sum(
            kind.groups * max(0, table.end * size - max(num_tokens, table.first * size))
            for table, kind in zip(self._sequences[sequence].tables, self.kinds, strict=True)
        )

    def lookup(self, tokens: Sequence[int], chain: HashChain) -> CachedPrefix:
        """The entries that serve the longest prefix of `tokens` which every kind can continue; changes nothing.

        The prefix never includes the last token, which must be computed for its logits.
        """
        limit = longest = (len(tokens) - 1) // self.block_size if self.prefix_caching else 0
        digests = chain.first(tokens, limit)
        for kind in self._full:
            longest = next((at for at in range(longest) if digests[at] not in self._indices[kind]), longest)
        length = self._continuable(tokens, chain, longest)
        next_index = None
        if length < limit:
            next_index = longest if self._full and length == longest else -1
        by_kind = [
            [index[digests[at]] for at in range(self._first(kind.window, length), length)]
            for kind, index in zip(self.kinds, self._indices, strict=True)
        ]
        return CachedPrefix(by_kind, length, next_index)

    def next_block(self, tokens: Sequence[int], cached: Sequence[int]) -> int | None:
        return cached.next_index if isinstance(cached, CachedPrefix) else None

    def indexes(self, tokens: Sequence[int], chain: HashChain, block: int) -> bool:
        if block < 0:
            return True
        digest = chain.digest(tokens, block)
        return all(digest in self._indices[kind] for kind in self._full)

    def awaits(self, tokens: Sequence[int], chain: HashChain, cached: Sequence[int]) -> bool:
        length = cached.length if isinstance(cached, CachedPrefix) else 0
        if not self._pending or length >= (len(tokens) - 1) // self.block_size:
            return False
        return chain.digest(tokens, length) in self._pending

    def shortage(self, num_tokens: int, cached: Sequence[int]) -> GroupedShortage:
        length, begin = self.blocks_for(num_tokens), cached.length if isinstance(cached, CachedPrefix) else 0
        wanted = sum(
            kind.groups * (end - begin) for kind, (_, end) in zip(self.kinds, self._ranges(begin, length), strict=True)
        )
        revived = sum(len(self._blocks_of[entry]) for entry in cached if self._references[entry] == 0)
        return GroupedShortage(
            wanted - (self.num_available - revived), cached, self._references, self._sequences, self._blocks_of
        )

    def allocate(self, sequence: int, num_tokens: int, cached: Sequence[int] = ()) -> list[int] | None:
        if not self.can_allocate(num_tokens, cached):
            return None
        for entry in cached:
            self._reference(entry)
        if self._observer is not None and cached:
            self._observer.reused(cached)
        length, begin = self.blocks_for(num_tokens), 0
        found: Sequence[Sequence[int]] = [()] * len(self.kinds)
        if isinstance(cached, CachedPrefix):
            begin, found = cached.length, cached.by_kind
        tables = []
        for kind, (first, end) in enumerate(self._ranges(begin, length)):
            table = KindTable(first, list(found[kind]), begin)
            tables.append(table)
            update = self.updates[sequence * len(self.kinds) + kind] = [-first] if first else []
            update += [block for entry in table.entries for block in self._blocks_of[entry]]
            self._grow(sequence, kind, table, end)
        self._sequences[sequence] = SequenceTables(tables, length, begin)
        return list(self.table(sequence))

    def extend(self, sequence: int, num_tokens: int, position: int | None = None) -> list[int] | None:
        """Give up the entries behind the windows, and add entries of all kinds until they hold `num_tokens`.

        position: as in BlockManager. Returns the blocks added; None, with nothing added, if there are not enough.
        """
        state = self._sequences[sequence]
        length = -(-num_tokens // self.block_size)
        if self._windows:
            self._drop(state, state.length * self.block_size if position is None else position)
        if (length - state.length) * self.blocks_per_extension > self.num_available:
            return None
        state.length = max(state.length, length)
        added: list[int] = []
        for kind, table in enumerate(state.tables):
            added += self._grow(sequence, kind, table, state.length)
        return added

    def shrink(self, sequence: int, num_tokens: int) -> None:
        state, kept = self._sequences[sequence], -(-num_tokens // self.block_size)
        if kept < state.length:
            state.length = kept
            for kind, table in enumerate(state.tables):
                if table.end > kept:
                    for entry in reversed(table.entries[kept - table.first :]):
                        self._dereference(entry)
                    del table.entries[kept - table.first :]
                    self._note_end(sequence * len(self.kinds) + kind, kept)

    def slide(self, sequence: int, position: int) -> bool:
        state = self._sequences[sequence]
        position = max(position, state.cached * self.block_size)
        self._drop(state, position)
        ends = [(kind, min(state.length, state.tables[kind].first + self._spans[kind])) for kind, _ in self._windows]
        missing = sum(self.kinds[kind].groups * max(0, end - state.tables[kind].end) for kind, end in ends)
        if missing > self.num_available:
            return False
        for kind, end in ends:
            self._grow(sequence, kind, state.tables[kind], end)
        return True

    def index_pending(self, sequence: int, tokens: Sequence[int], chain: HashChain) -> None:
        """Note the blocks that the sequence is about to compute, for `awaits`."""
        if self.prefix_caching:
            state = self._sequences[sequence]
            for index in range(state.cached, (len(tokens) - 1) // self.block_size):
                digest = state.pending[index] = chain.digest(tokens, index)
                self._pending[digest] += 1

    def register(self, sequence: int, tokens: Sequence[int], chain: HashChain, num_computed: int) -> None:
        """Index the full entries of the sequence's first `num_computed` tokens that it still holds."""
        if not self.prefix_caching:
            return
        state, end = self._sequences[sequence], num_computed // self.block_size
        for kind, table in enumerate(state.tables):
            indexed = self._indices[kind]
            for index in range(max(table.indexed, table.first), min(end, table.end)):
                digest = chain.digest(tokens, index)
                if digest not in indexed:
                    entry = indexed[digest] = table.entries[index - table.first]
                    self._digests[entry] = digest
                    if self._observer is not None:
                        self._observer.stored(kind, (entry,), tokens, chain, index)
            table.indexed = max(table.indexed, end)
        while state.pending and (index := next(iter(state.pending))) < end:
            self._forget_pending(state.pending.pop(index))

    def claim(self, sequence: int, position: int, end: int, max_tokens: int) -> tuple[int, int]:
        """The start and number of tokens of the sequence's next chunk, which no other sequence computes."""
        start = max(position, self._sequences[sequence].cached * self.block_size)
        return start, min(end - start, max_tokens)

    def return_claim(self, sequence: int, start: int, count: int) -> None:
        pass

    def shares(self, sequence: int, start: int, count: int) -> bool:
        """Never: sequences share only computed entries."""
        return False

    def unregister(self, tokens: Sequence[int], chain: HashChain) -> None:
        for index in range(len(tokens) // self.block_size if self.prefix_caching else 0):
            digest = chain.digest(tokens, index)
            for indexed in self._indices:
                entry = indexed.get(digest)
                if entry is not None:
                    self._unindex(entry)
                    if self._references[entry] == 0:
                        del self._cached[entry]
                        self._count_cached(entry, -1)
                        self._free += self._blocks_of[entry]

    def forget_prefixes(self) -> int:
        for indexed in self._indices:
            for entry in indexed.values():
                self._digests[entry] = None
            indexed.clear()
        freed = self._num_cached
        for entry in self._cached:
            self._count_cached(entry, -1)
            self._free += self._blocks_of[entry]
        self._cached.clear()
        for state in self._sequences.values():
            state.pending.clear()
            for table in state.tables:
                table.indexed = NEVER
        self._pending.clear()
        if self._observer is not None:
            self._observer.cleared()
        return freed

    def free(self, sequence: int) -> None:
        state = self._sequences.pop(sequence)
        # From the last index to the first, so that a prefix is evicted from its end.
        for index in range(max((table.end for table in state.tables), default=0) - 1, -1, -1):
            for table in state.tables:
                if table.first <= index < table.end:
                    self._dereference(table.entries[index - table.first])
        for digest in state.pending.values():
            self._forget_pending(digest)
        for kind in range(len(self.kinds)):
            self.updates.pop(sequence * len(self.kinds) + kind, None)

    def check(self) -> None:
        references: Counter[int] = Counter()
        pending: Counter[bytes] = Counter()
        for state in self._sequences.values():
            pending.update(state.pending.values())
            for kind, table in enumerate(state.tables):
                references.update(table.entries)
                assert len(set(table.entries)) == len(table.entries), "an entry repeats"
                assert all(self._kind_of[entry] == kind for entry in table.entries), "an entry is of another kind"
                assert self.kinds[kind].window is not None or (table.first, table.end) == (0, state.length), (
                    "a table without a window is not whole"
                )
                assert len(table.entries) <= self._spans[kind], "a table holds more than it may need"
        assert pending == self._pending, "the pending digests are wrong"
        used = [block for entry in references for block in self._blocks_of[entry]]
        cached = [block for entry in self._cached for block in self._blocks_of[entry]]
        blocks = [*used, *cached, *self._free]
        assert len(set(blocks)) == len(blocks), "a block is in two states"
        assert len(blocks) == self.num_blocks, "a block is lost"
        assert (self.num_used, self.num_cached) == (len(used), len(cached)), "the counts of blocks are wrong"
        assert sum(self._used_by_kind) == len(used), "the used blocks by kind are wrong"
        assert sum(self._cached_by_kind) == len(cached), "the cached blocks by kind are wrong"
        assert all(self._references[entry] == count for entry, count in references.items()), (
            "a reference count is wrong"
        )
        assert all(self._references[entry] == 0 for entry in self._cached), "a cached entry is in use"
        for kind, indexed in enumerate(self._indices):
            for digest, entry in indexed.items():
                assert (self._digests[entry], self._kind_of[entry]) == (digest, kind), "the digest index is wrong"
                assert entry in references or entry in self._cached, "an indexed entry is free"
        assert all(self._digests[entry] is not None for entry in self._cached), "a cached entry has no digest"

    def _first(self, window: int | None, length: int) -> int:
        """Index of the first entry that the token behind `length` full entries attends to."""
        return 0 if window is None else max(0, length * self.block_size + 1 - window) // self.block_size

    def _ranges(self, begin: int, length: int) -> Iterator[tuple[int, int]]:
        """Per kind, the first and last index (exclusive) of a new sequence of `length` with a prefix of `begin`."""
        for kind, most in zip(self.kinds, self._spans, strict=True):
            first = self._first(kind.window, begin)
            yield first, min(length, first + most)

    def _continuable(self, tokens: Sequence[int], chain: HashChain, length: int) -> int:
        """The longest prefix, at most `length`, of whose last window every kind with a window has the entries."""
        firsts = [(self._indices[kind], self._first(window, length)) for kind, window in self._windows]
        index = length
        while index > min((first for _, first in firsts), default=index):
            index -= 1
            digest = chain.digest(tokens, index)
            if any(index >= first and digest not in indexed for indexed, first in firsts):
                length = index
                firsts = [(self._indices[kind], self._first(window, length)) for kind, window in self._windows]
        return length

    def _drop(self, state: SequenceTables, position: int) -> None:
        """Give up the entries that the token at `position` and later ones do not attend to."""
        for kind, window in self._windows:
            table = state.tables[kind]
            first = max(0, position + 1 - window) // self.block_size
            if first > table.first:
                count = min(first - table.first, len(table.entries))
                for entry in table.entries[:count]:
                    self._dereference(entry)
                del table.entries[:count]
                table.first += count

    def _grow(self, sequence: int, kind: int, table: KindTable, end: int) -> list[int]:
        """Add new entries to a table up to index `end`; returns their blocks."""
        added: list[int] = []
        groups = self.kinds[kind].groups
        for _ in range(table.end, end):
            blocks = tuple(self._take_blocks(groups))
            entry = blocks[0]
            self._blocks_of[entry] = blocks
            self._kind_of[entry] = kind
            self._references[entry] = 1
            if self._observer is not None:
                self._observer.allocated((entry,))
            table.entries.append(entry)
            added += blocks
        self._used_by_kind[kind] += len(added)
        if added:
            self.updates.setdefault(sequence * len(self.kinds) + kind, []).extend(added)
        return added

    def _take_blocks(self, count: int) -> list[int]:
        """Take the blocks of one entry, for `_grow`."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        """Take a free block, or one of the least recently used cached entry, which is removed."""
        if self._free:
            return self._free.pop()
        entry, _ = self._cached.popitem(last=False)
        if self._observer is not None:
            self._observer.evicted((entry,))
        self._unindex(entry)
        self._count_cached(entry, -1)
        block, *others = self._blocks_of[entry]
        self._free += others
        return block

    def _reference(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
            self._count_cached(block, -1)
            self._used_by_kind[self._kind_of[block]] += len(self._blocks_of[block])
        self._references[block] += 1

    def _dereference(self, block: int) -> None:
        blocks, kind = self._blocks_of[block], self._kind_of[block]
        self.releases += len(blocks)
        self._references[block] -= 1
        if self._references[block] == 0:
            self._used_by_kind[kind] -= len(blocks)
            if self._digests[block] is None:
                self._free += blocks
            else:
                self._cached[block] = None
                self._count_cached(block, 1)

    def _unindex(self, *blocks: int) -> None:
        for block in blocks:
            digest = self._digests[block]
            assert digest is not None
            del self._indices[self._kind_of[block]][digest]
            self._digests[block] = None
            if self._observer is not None:
                self._observer.removed(self._kind_of[block], (digest,))

    def _count_cached(self, entry: int, sign: int) -> None:
        count = sign * len(self._blocks_of[entry])
        self._num_cached += count
        self._cached_by_kind[self._kind_of[entry]] += count

    def _forget_pending(self, digest: bytes) -> None:
        self._pending[digest] -= 1
        if not self._pending[digest]:
            del self._pending[digest]
