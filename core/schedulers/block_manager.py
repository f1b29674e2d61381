"""Allocates KV blocks to sequences and indexes blocks by prefix for the prefix cache. Pure Python: no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from engine.core.schedulers.cache_observer import CacheObserver
from engine.core.schedulers.hash_chain import DigestCache, HashChain
from engine.core.schedulers.shortage import Shortage

NEVER = 2**62
"""`BlockTable.indexed` of a table whose further blocks are not indexed: larger than any table."""


class BlockTable:
    """The blocks of one sequence. The first `indexed` of them are indexed, or equal others that are."""

    __slots__ = ("blocks", "indexed")

    def __init__(self, blocks: list[int], indexed: int) -> None:
        self.blocks = blocks
        self.indexed = indexed


class BlockManager:
    """Allocates KV blocks to sequences, and shares blocks among sequences of equal prefix.

    A block is free, used (by one sequence, or by several with a common prefix) or cached: full, indexed by its digest
    and used by no sequence. When no block is free, the least recently used cached block is evicted and reused.

    A used block may be indexed before it is computed (`index_pending`). Sequences that share such a block compute it
    once: whichever is planned first claims its tokens (`claim`), and the others continue behind them. A claimed token
    counts as computed, since steps run in the order planned.

    This class serves a cache whose layers all keep the whole context; GroupedBlockManager serves all others.
    """

    slides = False
    """Whether prefilling sequences get and give up blocks as they go (`slide`)."""
    blocks_per_extension = 1
    """Blocks that a sequence takes when its blocks are full."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        observer: CacheObserver | None = None,
    ) -> None:
        """observer: is notified of what happens to blocks; None: nothing is."""
        self._observer = observer
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._claimed = [0] * num_blocks  # tokens that prefill chunks compute; all tokens of a block that is registered
        self._by_digest: dict[bytes, int] = {}
        self._tables: dict[int, BlockTable] = {}
        self._digest_cache = DigestCache(num_blocks if prefix_caching else 0)
        self.releases = 0
        """How often a sequence has given up a block: while this does not change, no shortage becomes smaller."""
        self.updates: dict[int, list[int]] = {}
        """Sequence -> its new blocks that the runner does not know yet, in the form of Step.blocks."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unused blocks kept in the prefix cache."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks in the block tables of sequences."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def usage_by_kind(self) -> tuple[tuple[str, int, int], ...]:
        """Name, used and cached blocks of each kind of layers; empty for one kind."""
        return ()

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence: int) -> tuple[int, ...]:
        """The block table of a sequence."""
        return tuple(self._tables[sequence].blocks)

    def num_held(self, sequence: int) -> int:
        """Number of blocks in the block table of a sequence."""
        return len(self._tables[sequence].blocks)

    def capacity(self, sequence: int) -> int:
        """Tokens that the blocks of a sequence hold."""
        return len(self._tables[sequence].blocks) * self.block_size

    def unfilled_slots(self, sequence: int, num_tokens: int) -> int:
        """Slots in the blocks of a sequence that its first `num_tokens` leave empty."""
        return len(self._tables[sequence].blocks) * self.block_size - num_tokens

    def count_cached(self, entries: Iterable[int]) -> int:
        """How many of these indexed blocks (of several kinds of layers: entries) no sequence uses."""
        return sum(not self._references[entry] for entry in entries)

    def chain(self, salt: str) -> HashChain:
        """The hash chain of a new sequence, which reuses digests that other sequences have computed."""
        return HashChain(self.block_size, salt, self._digest_cache)

    def lookup(self, tokens: Sequence[int], chain: HashChain) -> list[int]:
        """Blocks that hold, or will hold, the longest indexed prefix of `tokens`; changes nothing.

        The prefix never includes the last token, which must be computed for its logits.
        """
        if not self.prefix_caching:
            return []
        found: list[int] = []
        for digest in chain.first(tokens, (len(tokens) - 1) // self.block_size):
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, num_tokens: int, cached: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed."""
        return self.shortage(num_tokens, cached).blocks <= 0

    def shortage(self, num_tokens: int, cached: Sequence[int]) -> Shortage:
        """Count the blocks missing for a new sequence of `num_tokens` that begins with the blocks `cached`."""
        return Shortage(self, self.blocks_for(num_tokens), cached, self._references, self._tables)

    def next_block(self, tokens: Sequence[int], cached: Sequence[int]) -> int | None:
        """Index of the first block behind `cached` (from `lookup`) that may be indexed later; None: there is none."""
        return len(cached) if len(cached) < (len(tokens) - 1) // self.block_size else None

    def indexes(self, tokens: Sequence[int], chain: HashChain, block: int) -> bool:
        """Whether the full block at index `block` of `tokens` is indexed, and so may extend what `lookup` finds."""
        return chain.digest(tokens, block) in self._by_digest

    def awaits(self, tokens: Sequence[int], chain: HashChain, cached: Sequence[int]) -> bool:
        """Whether running sequences are about to compute a longer prefix than `cached` (from `lookup`), which a new
        sequence can share only then."""
        return False

    def allocate(self, sequence: int, num_tokens: int, cached: Sequence[int] = ()) -> list[int] | None:
        """Allocate blocks for the first `num_tokens` of a new sequence; `cached` (from `lookup`) come first.

        Returns all the sequence's blocks; None, with nothing changed, if there are not enough.
        """
        if not self.can_allocate(num_tokens, cached):
            return None
        for block in cached:
            self._reference(block)
        if self._observer is not None and cached:
            self._observer.reused(cached)
        self._tables[sequence] = BlockTable(list(cached), indexed=len(cached))
        self.updates[sequence] = list(cached)
        self.extend(sequence, num_tokens)
        return list(self._tables[sequence].blocks)

    @contextmanager
    def held(self, blocks: Sequence[int]) -> Iterator[None]:
        """Keep these blocks (from `lookup`), computed or not, while the sequences that use them are freed."""
        for block in blocks:
            self._reference(block)
        yield
        for block in blocks:
            self._dereference(block)

    def extend(self, sequence: int, num_tokens: int, position: int | None = None) -> list[int] | None:
        """Add blocks to a sequence until they hold `num_tokens`.

        position: of the next token to compute; None: the first that the blocks do not hold.
        Returns the blocks added, if any; None, with nothing changed, if there are not enough.
        """
        blocks = self._tables[sequence].blocks
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing > len(self._free) + len(self._cached):
            return None
        added = self._take_blocks(missing) if missing > 0 else []
        if added:
            blocks += added
            self.updates.setdefault(sequence, []).extend(added)
        return added

    def shrink(self, sequence: int, num_tokens: int) -> None:
        """Free the blocks of a sequence that its first `num_tokens` do not need; none of them may be indexed."""
        blocks, kept = self._tables[sequence].blocks, -(-num_tokens // self.block_size)
        if kept < len(blocks):
            for block in reversed(blocks[kept:]):
                self._dereference(block)
            del blocks[kept:]
            self._note_end(sequence, kept)

    def _note_end(self, table: int, end: int) -> None:
        """Have the runner put the next blocks of a table from index `end` on; it must know the blocks before."""
        assert table not in self.updates, "blocks are freed that the runner does not know yet"
        self.updates[table] = [-end]

    def slide(self, sequence: int, position: int) -> bool:
        """Exchange the blocks that a prefilling sequence no longer needs, once it computes `position`, for those of the
        next chunk. False if there are not enough."""
        raise NotImplementedError

    def index_pending(self, sequence: int, tokens: Sequence[int], chain: HashChain) -> None:
        """Index the sequence's full blocks of `tokens` before they are computed, so that `lookup` finds them.

        The block of the last token stays private: the sequence itself must compute that token, for its logits.
        """
        if self.prefix_caching:
            self._index(self._tables[sequence], tokens, chain, (len(tokens) - 1) // self.block_size)

    def register(self, sequence: int, tokens: Sequence[int], chain: HashChain, num_computed: int) -> None:
        """Index the full blocks of the sequence's first `num_computed` tokens.

        A block stays private if another with the same digest is indexed: one block per digest.
        """
        if self.prefix_caching:
            table, end = self._tables[sequence], num_computed // self.block_size
            for block in table.blocks[table.indexed : end]:
                self._claimed[block] = self.block_size
            self._index(table, tokens, chain, end)

    def claim(self, sequence: int, position: int, end: int, max_tokens: int) -> tuple[int, int]:
        """Claim the next tokens between `position` and `end` for a chunk of the sequence. Returns the chunk's start and
        its number of tokens, at most `max_tokens`.

        The chunk starts behind the tokens that are already claimed, and ends before the next block with claimed tokens.
        """
        blocks, claimed, size = self._tables[sequence].blocks, self._claimed, self.block_size
        first = position // size
        while claimed[blocks[first]] == size:
            first += 1
        start = first * size + claimed[blocks[first]]
        end = min(end, start + max_tokens)
        for index in range(first, -(-end // size)):
            if claimed[blocks[index]] and index > first:
                end = index * size
                break
            claimed[blocks[index]] = min(end - index * size, size)
        return start, end - start

    def return_claim(self, sequence: int, start: int, count: int) -> None:
        """Undo the latest `claim` of these tokens, which no step will compute."""
        size = self.block_size
        for index in range(start // size, -(-(start + count) // size)):
            self._claimed[self._tables[sequence].blocks[index]] = max(0, start - index * size)

    def shares(self, sequence: int, start: int, count: int) -> bool:
        """Whether other sequences use blocks of these tokens of the sequence."""
        blocks = self._tables[sequence].blocks[start // self.block_size : -(-(start + count) // self.block_size)]
        return any(self._references[block] > 1 for block in blocks)

    def unregister(self, tokens: Sequence[int], chain: HashChain) -> None:
        """Remove all full blocks of `tokens` from the prefix cache: their contents are wrong."""
        for index in range(len(tokens) // self.block_size if self.prefix_caching else 0):
            block = self._by_digest.get(chain.digest(tokens, index))
            if block is not None:
                self._unindex(block)
                if self._references[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def forget_prefixes(self) -> int:
        """Empty the prefix cache; return the number of blocks freed.

        Blocks of running sequences are kept, but no other sequence will share them, nor those they get later.
        """
        for block in self._by_digest.values():
            self._digests[block] = None
        self._by_digest.clear()
        freed = len(self._cached)
        self._free += self._cached
        self._cached.clear()
        for table in self._tables.values():
            table.indexed = NEVER
        if self._observer is not None:
            self._observer.cleared()
        return freed

    def free(self, sequence: int) -> None:
        """Free a sequence's blocks; indexed and computed blocks that no other sequence uses stay cached."""
        # Last block first, so that a prefix is evicted from its end: `lookup` finds no block without its predecessor.
        for block in reversed(self._tables.pop(sequence).blocks):
            self._dereference(block)
        self.updates.pop(sequence, None)

    def check(self) -> None:
        """Raise AssertionError unless each block is in exactly one state."""
        references = Counter(block for table in self._tables.values() for block in table.blocks)
        used, free, cached = set(references), set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(used) + len(free) + len(cached) == len(used | free | cached), "a block is in two states"
        assert used | free | cached == set(range(self.num_blocks)), "a block is lost"
        assert self.num_used == len(used), "free + cached + used is not the total"
        assert self._references == [references[block] for block in range(self.num_blocks)], "a reference count is wrong"
        assert all(len(set(table.blocks)) == len(table.blocks) for table in self._tables.values()), "a block repeats"
        known = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        assert {digest: block for block, digest in known.items()} == self._by_digest, "the digest index is wrong"
        assert cached <= known.keys(), "a cached block has no digest"
        assert not free & known.keys(), "a free block has a digest"
        assert all(self._claimed[block] == self.block_size for block in cached), "a cached block is not computed"

    def _index(self, table: BlockTable, tokens: Sequence[int], chain: HashChain, end: int) -> None:
        """Index the first `end` blocks of a table."""
        begin = table.indexed  # of the latest run of blocks that are indexed here
        for index in range(begin, end):
            digest = chain.digest(tokens, index)
            if digest not in self._by_digest:
                block = table.blocks[index]
                self._by_digest[digest] = block
                self._digests[block] = digest
            else:
                self._notify_stored(table, tokens, chain, begin, index)
                begin = index + 1
            table.indexed = index + 1
        self._notify_stored(table, tokens, chain, begin, end)

    def _notify_stored(self, table: BlockTable, tokens: Sequence[int], chain: HashChain, begin: int, end: int) -> None:
        """Notify the observer of the blocks of a table from index `begin` to `end`, if there are any."""
        if self._observer is not None and begin < end:
            self._observer.stored(0, table.blocks[begin:end], tokens, chain, begin)

    def _reference(self, block: int) -> None:
        """Count another user of an indexed block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def _dereference(self, block: int) -> None:
        """Count one user less. Without users, an indexed and computed block becomes cached, any other free."""
        self.releases += 1
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._digests[block] is not None and self._claimed[block] < self.block_size:
                self._unindex(block)
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def _unindex(self, *blocks: int) -> None:
        removed = []
        for block in blocks:
            digest = self._digests[block]
            assert digest is not None
            del self._by_digest[digest]
            self._digests[block] = None
            removed.append(digest)
        if self._observer is not None:
            self._observer.removed(0, removed)

    def _take_blocks(self, count: int) -> list[int]:
        """Take free blocks, or evict the least recently used cached ones."""
        free, references, claimed = self._free, self._references, self._claimed
        blocks = [free.pop() for _ in range(min(count, len(free)))]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            references[block] = 1
            claimed[block] = 0
        if self._observer is not None:
            self._observer.allocated(blocks)
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Remove the least recently used cached blocks from the prefix cache."""
        blocks = [self._cached.popitem(last=False)[0] for _ in range(count)]
        if self._observer is not None:
            self._observer.evicted(blocks)
        self._unindex(*blocks)
        return blocks
