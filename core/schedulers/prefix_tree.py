"""The blocks in the prefix cache as a tree: which of them no sequence can begin with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Key = TypeVar("Key", int, bytes)

Entries = int | set[int]
"""One entry, or several: nearly all entries are followed by one at most, which needs no set."""


class PrefixTree:
    """The entries of one kind of layers by their digests; each is behind the one of its parent digest.

    An entry is reachable if all entries before it, up to the start of the sequence, are there.

    Thousands of entries come and go per second. So a sequence of them is added by a few calls, and there are no objects
    per entry, which garbage collections would have to scan.
    """

    def __init__(self) -> None:
        self.unreachable: set[int] = set()
        """The entries that are not reachable."""
        self._entries: dict[bytes, int] = {}
        self._parents: dict[int, int | bytes] = {}
        """Entry -> the entry before it, or its digest if it is missing; without entries that begin a sequence."""
        self._children: dict[int, Entries] = {}
        """Entry -> the entries directly behind it, if there are any."""
        self._orphans: dict[bytes, Entries] = {}
        """Digest of a missing entry -> the entries directly behind it."""

    def add(self, entries: Sequence[int], digests: Sequence[bytes], parent: bytes | None) -> None:
        """Add entries, each behind the one before. parent: digest before the first; None: it begins its sequence."""
        first, reachable = entries[0], True
        if parent is not None:
            before = self._entries.get(parent)
            if before is None:
                self._parents[first] = parent
                _attach(self._orphans, parent, first)
                reachable = False
            else:
                self._parents[first] = before
                if before in self._children:
                    _attach(self._children, before, first)
                else:
                    self._children[before] = first
                reachable = before not in self.unreachable
        if len(entries) == 1:
            self._entries[digests[0]] = first
        else:
            self._entries.update(zip(digests, entries, strict=True))
            self._parents.update(zip(entries[1:], entries, strict=False))
            self._children.update(pairwise(entries))
        if not reachable:
            self.unreachable.update(entries)
        if self._orphans:
            self._adopt(entries, digests, reachable)

    def remove(self, digests: Sequence[bytes]) -> None:
        """Remove entries; those behind them become unreachable."""
        entries, parents, children = self._entries, self._parents, self._children
        for digest in digests:
            entry = entries.pop(digest)
            before = parents.pop(entry, None)
            if isinstance(before, int):
                if children[before] == entry:
                    del children[before]
                else:
                    _detach(children, before, entry)
            elif before is not None:
                _detach(self._orphans, before, entry)
            if self.unreachable:
                self.unreachable.discard(entry)
            if entry in children:
                behind = self._orphans[digest] = children.pop(entry)
                parents.update(dict.fromkeys(_each(behind), digest))
                self._mark(_each(behind), reachable=False)

    def clear(self) -> None:
        """Remove all entries."""
        self.unreachable.clear()
        self._entries.clear()
        self._parents.clear()
        self._children.clear()
        self._orphans.clear()

    def _adopt(self, entries: Sequence[int], digests: Sequence[bytes], reachable: bool) -> None:
        """Join new entries with those behind them that were there before."""
        for entry, digest in zip(entries, digests, strict=True):
            if digest in self._orphans:
                behind = list(_each(self._orphans.pop(digest)))
                for child in behind:
                    self._parents[child] = entry
                    _attach(self._children, entry, child)
                if reachable:
                    self._mark(behind, reachable=True)

    def _mark(self, entries: Iterable[int], *, reachable: bool) -> None:
        """Change entries and all that is behind them."""
        change = self.unreachable.discard if reachable else self.unreachable.add
        marked = list(entries)
        while marked:
            entry = marked.pop()
            change(entry)
            if entry in self._children:
                marked += _each(self._children[entry])


def _each(entries: Entries) -> Iterable[int]:
    return (entries,) if isinstance(entries, int) else entries


def _attach(behind: dict[Key, Entries], before: Key, entry: int) -> None:
    """Add an entry to those behind `before`."""
    others = behind.setdefault(before, entry)
    if isinstance(others, set):
        others.add(entry)
    elif others != entry:
        behind[before] = {others, entry}


def _detach(behind: dict[Key, Entries], before: Key, entry: int) -> None:
    """Remove an entry from those behind `before`."""
    others = behind[before]
    if isinstance(others, set):
        others.remove(entry)
        if len(others) == 1:
            behind[before] = others.pop()
    else:
        del behind[before]
