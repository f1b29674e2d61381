"""Which replica a request goes to: where it costs least, counting what a replica has to do and what its cache saves.

All costs are in tokens. A request's is the part of its prompt that the replica must compute, until its first token is
there, and what its answer may take, until it ends. So a prefix draws a request to the replica that has it as long as
that one is not busier than the least busy one by more tokens than the prefix saves: then computing it anew is cheaper
than waiting, and two replicas have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count, groupby

from attrs import frozen

from engine.core.schedulers import HashChain
from engine.core.types import Request

ANSWER_TOKENS = 256
"""An answer counts as much as its max_tokens, and at most so much: how long it becomes is not known before."""
MOST_BLOCKS = 1024
"""Leading blocks of a prompt that are looked at: what hashing them takes holds up the front end."""
MOST_KNOWN = 2**16
"""Blocks that are remembered of one replica at most, whatever its cache holds."""


@frozen
class Place:
    """Where one request goes, and what it adds to the load there, tokens."""

    replica: int
    prompt: int
    """Until its first token has come."""
    answer: int
    """Until it ends."""


class Prefixes:
    """The blocks that the prefix cache of one replica is believed to hold: those of the requests it was sent."""

    def __init__(self, most: int) -> None:
        """most: blocks in the cache; beyond that the least recently used are forgotten, as there."""
        self._most = most
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # the next to be forgotten first

    def __len__(self) -> int:
        return len(self._digests)

    def known(self, digests: Sequence[bytes]) -> int:
        """How many of a prompt's leading blocks are there."""
        for number, digest in enumerate(digests):
            if digest not in self._digests:
                return number
        return len(digests)

    def remember(self, digests: Sequence[bytes]) -> None:
        """The replica is sent a prompt of these blocks."""
        for digest in reversed(digests):  # so that a prefix is forgotten from its end
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._most:
            self._digests.popitem(last=False)


class Router:
    """Chooses replicas, and remembers which prompts it sent where. A front end has one."""

    def __init__(self, blocks: Sequence[int], block_size: int) -> None:
        """blocks: in each replica's prefix cache; 0: it has none. block_size: tokens a block."""
        self._block_size = block_size
        self._prefixes = [Prefixes(min(most, MOST_KNOWN)) for most in blocks]
        self._caches = any(blocks)
        self._turn = count()

    def renew(self, replica: int, blocks: int) -> None:
        """The replica's prefix cache is empty, and has so many blocks; 0: it has none."""
        self._prefixes[replica] = Prefixes(min(blocks, MOST_KNOWN))
        self._caches = self._caches or blocks > 0

    def place(self, requests: Sequence[Request], loads: Sequence[float | None]) -> list[Place]:
        """A place for each request; neighbours with one prompt, the choices of n, stay together.

        loads: tokens that each replica has to do; None: it takes no requests. One of them must be a number.
        """
        loads = list(loads)
        places: list[Place] = []
        for _, choices in groupby(requests, key=lambda request: (request.salt, request.prompt)):
            first, *others = choices
            replica, prompt = self._choose(first.prompt, first.salt, loads)
            places.append(Place(replica, prompt, _answer(first)))
            places += [Place(replica, 0, _answer(other)) for other in others]  # they share its blocks
            load = loads[replica]
            assert load is not None
            loads[replica] = load + prompt + sum(place.answer for place in places[-1 - len(others) :])
        return places

    def _choose(self, prompt: Sequence[int], salt: str, loads: Sequence[float | None]) -> tuple[int, int]:
        """The replica for a prompt, and how many of its tokens that must compute."""
        if len(loads) == 1:
            return 0, len(prompt)
        digests = self._digests(prompt, salt)
        # Front ends do not know what the others remember: where all costs are equal, the same prompt makes the same
        # choice in each.
        first = int.from_bytes(digests[0][:8], "big") if digests else next(self._turn)
        best: tuple[float, int, int, int] | None = None
        for replica, load in enumerate(loads):
            if load is not None:
                new = len(prompt) - self._prefixes[replica].known(digests) * self._block_size
                turn = (replica - first) % len(loads)
                if best is None or (load + new, new, turn) < best[:3]:
                    best = (load + new, new, turn, replica)
        assert best is not None, "no replica takes requests"
        self._prefixes[best[3]].remember(digests)
        return best[3], best[1]

    def _digests(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Of the prompt's leading blocks; never of all, as in the cache: the last token must be computed."""
        blocks = min((len(prompt) - 1) // self._block_size, MOST_BLOCKS) if self._caches else 0
        chain = HashChain(self._block_size, salt)
        return [chain.digest(prompt, block) for block in range(blocks)]


def _answer(request: Request) -> int:
    return min(request.params.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS)
