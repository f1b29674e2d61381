"""Chooses the replica for each request: the one with the lowest cost, from its load and the prefix it has cached.

All costs are in tokens. A request costs a replica the part of the prompt that the replica must compute, until the first
token has come, and the expected length of the output, until the request ends. So a prefix attracts a request to the
replica that has the prefix cached, unless that replica's load exceeds the lowest load by more tokens than the prefix
saves: then computing the prefix again is cheaper than waiting, and two replicas have it.

Requests with the same cache key go to the same replica, the key's home, which every front end computes from the key
alone. They go elsewhere, by cost, while the home's load exceeds the lowest load by more tokens than their prompt has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count, groupby

from attrs import frozen

from engine.core.schedulers import DigestCache, HashChain
from engine.core.types import Request

MAX_OUTPUT_COST = 256
"""An output costs its max_tokens, but at most this: the actual length is not known in advance."""
MAX_HASHED_BLOCKS = 1024
"""Maximum number of leading blocks of a prompt that are hashed, because hashing blocks the front end."""
MAX_HASHED_IN_ALL = 4096
"""Maximum number of blocks hashed of all prompts submitted together; each prompt has an equal share."""
MAX_INDEXED_BLOCKS = 2**16
"""Maximum number of blocks remembered per replica, however large the replica's cache is."""

MIN_KEY_ALLOWANCE = 2048
"""Tokens by which the load of a cache key's home may exceed the lowest load, however short the prompt is: the first
requests of a session must not leave their home for a few other short ones."""


@frozen
class Placement:
    """The replica chosen for a request's choices, and their cost there, tokens."""

    replica: int
    prompt_cost: int
    """Of all choices, until the first token has come."""
    output_cost: int
    """Of each choice, until it ends."""


class PrefixIndex:
    """The blocks that the prefix cache of one replica is believed to hold: those of the prompts sent to the replica."""

    def __init__(self, max_blocks: int) -> None:
        """max_blocks: blocks in the cache. Beyond that the least recently used are forgotten, as in the cache."""
        self.max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._digests)

    def match(self, digests: Sequence[bytes]) -> int:
        """Number of a prompt's leading blocks that are indexed."""
        for number, digest in enumerate(digests):
            if digest not in self._digests:
                return number
        return len(digests)

    def insert(self, digests: Sequence[bytes]) -> None:
        """Index the blocks of a prompt that is sent to the replica."""
        for digest in reversed(digests):  # so that a prefix is forgotten from its end
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self.max_blocks:
            self._digests.popitem(last=False)


class Router:
    """Chooses replicas, and remembers the prompts sent to each. A front end has one router."""

    def __init__(self, num_blocks: Sequence[int], block_size: int) -> None:
        """num_blocks: in each replica's prefix cache, 0 if it has none. block_size: tokens per block."""
        self._block_size = block_size
        self._names = [b"%d" % replica for replica in range(len(num_blocks))]
        self._prefixes = [PrefixIndex(min(blocks, MAX_INDEXED_BLOCKS)) for blocks in num_blocks]
        self._any_cache = any(num_blocks)
        self._digest_cache = DigestCache(MAX_INDEXED_BLOCKS)
        self._turn = count()

    def reset(self, replica: int, num_blocks: int) -> None:
        """Forget a replica's blocks: its prefix cache is empty and has `num_blocks` blocks, 0 if it has none."""
        self._prefixes[replica] = PrefixIndex(min(num_blocks, MAX_INDEXED_BLOCKS))
        self._any_cache = self._any_cache or num_blocks > 0

    def change_replicas(self, num_blocks: Mapping[str, int]) -> None:
        """Choose among these replicas from now on, in the order of `num_blocks`.

        num_blocks: in the prefix cache of each replica by its name, which has 16 bytes at most, and which no other
        replica has had before. What is known of a replica that stays is kept, and cache keys keep their homes.
        """
        known = dict(zip(self._names, self._prefixes, strict=True))
        self._names = [name.encode() for name in num_blocks]
        self._prefixes = [known.get(name, PrefixIndex(0)) for name in self._names]
        for index, blocks in zip(self._prefixes, num_blocks.values(), strict=True):
            index.max_blocks = min(blocks, MAX_INDEXED_BLOCKS)
        self._any_cache = any(num_blocks.values())

    def place(self, requests: Sequence[Request], loads: Sequence[float | None], choices: int = 1) -> list[Placement]:
        """Choose a replica for each request with its `choices`; adjacent requests with equal prompts stay together.

        loads: load of each replica, tokens; None: the replica accepts no requests. At least one must be a number.
        """
        loads = list(loads)
        max_blocks = min(MAX_HASHED_BLOCKS, MAX_HASHED_IN_ALL // len(requests) + 1)
        placements: list[Placement] = []
        for _, equal in groupby(requests, key=lambda request: (request.salt, request.prompt)):
            first, *others = equal
            replica, prompt_cost = self._choose(first, loads, max_blocks)
            placements.append(Placement(replica, prompt_cost, _output_cost(first)))
            placements += [Placement(replica, 0, _output_cost(other)) for other in others]  # they share its blocks
            load = loads[replica]
            assert load is not None
            output_cost = sum(each.output_cost for each in placements[-1 - len(others) :])
            loads[replica] = load + prompt_cost + choices * output_cost
        return placements

    def _choose(self, request: Request, loads: Sequence[float | None], max_blocks: int) -> tuple[int, int]:
        """The replica for a request, and the number of prompt tokens which that replica must compute."""
        prompt = request.prompt
        if len(loads) == 1:
            return 0, len(prompt)
        digests = self._digests(prompt, request.salt, max_blocks)
        home = self._home(request, loads)
        # Front ends do not share their indexes: where all costs are equal, each chooses the same replica for the same
        # prompt.
        preferred = int.from_bytes(digests[0][:8], "big") if digests else next(self._turn)
        best: tuple[float, int, int, int] | None = None
        for replica, load in enumerate(loads):
            if load is not None and home in (None, replica):
                new_tokens = len(prompt) - self._prefixes[replica].match(digests) * self._block_size
                distance = (replica - preferred) % len(loads)
                if best is None or (load + new_tokens, new_tokens, distance) < best[:3]:
                    best = (load + new_tokens, new_tokens, distance, replica)
        assert best is not None, "no replica accepts requests"
        self._prefixes[best[3]].insert(digests)
        return best[3], best[1]

    def _home(self, request: Request, loads: Sequence[float | None]) -> int | None:
        """The home of a request's cache key; None without a key, or while the home has too much load.

        Chosen by rendezvous hashing among the replicas that accept requests, so the keys of a replica that is down
        spread over the others, and return to it.
        """
        if not request.cache_key or not self._any_cache:
            return None
        key = blake2b(request.salt.encode(), digest_size=16).digest()
        key += request.cache_key.encode()
        open_loads = {replica: load for replica, load in enumerate(loads) if load is not None}
        home = max(open_loads, key=lambda replica: blake2b(key, digest_size=8, salt=self._names[replica]).digest())
        allowance = max(len(request.prompt), MIN_KEY_ALLOWANCE)
        return home if open_loads[home] <= min(open_loads.values()) + allowance else None

    def _digests(self, prompt: Sequence[int], salt: str, max_blocks: int) -> list[bytes]:
        """Digests of the prompt's leading blocks; as in the cache, not of the last token, which is always computed."""
        blocks = min((len(prompt) - 1) // self._block_size, max_blocks) if self._any_cache else 0
        return HashChain(self._block_size, salt, self._digest_cache).first(prompt, blocks)


def _output_cost(request: Request) -> int:
    return min(request.params.max_tokens or MAX_OUTPUT_COST, MAX_OUTPUT_COST)
