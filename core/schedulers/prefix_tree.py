"""The blocks in the prefix cache as a tree: which of them no sequence can begin with."""

from __future__ import annotations


class _Node:
    """One entry in the prefix cache. children: by digest; None: none so far."""

    __slots__ = ("children", "entry", "parent", "reachable")

    def __init__(self, entry: int, parent: bytes | None) -> None:
        self.entry = entry
        self.parent = parent
        self.children: dict[bytes, _Node] | None = None
        self.reachable = True


class PrefixTree:
    """The entries of one kind of layers by their digests; each is behind the one of its parent digest.

    An entry is reachable if all entries before it, up to the start of the sequence, are there.
    """

    def __init__(self) -> None:
        self.unreachable: set[int] = set()
        """The entries that are not reachable."""
        self._nodes: dict[bytes, _Node] = {}
        self._orphans: dict[bytes, dict[bytes, _Node]] = {}
        """Entries whose parent is missing, by its digest."""

    def add(self, entry: int, digest: bytes, parent: bytes | None) -> None:
        """Add an entry. parent: digest of the block before it; None: it is the first of its sequence."""
        node = self._nodes[digest] = _Node(entry, parent)
        if parent is not None:
            before = self._nodes.get(parent)
            if before is None:
                self._orphans.setdefault(parent, {})[digest] = node
                node.reachable = False
            else:
                if before.children is None:
                    before.children = {}
                before.children[digest] = node
                node.reachable = before.reachable
        if not node.reachable:
            self.unreachable.add(entry)
        if self._orphans:
            node.children = self._orphans.pop(digest, None)
            if node.children and node.reachable:
                self._mark(node, reachable=True)

    def remove(self, digest: bytes) -> None:
        """Remove an entry; those behind it become unreachable."""
        node = self._nodes.pop(digest)
        if node.parent is not None:
            before = self._nodes.get(node.parent)
            siblings = self._orphans[node.parent] if before is None else before.children
            assert siblings is not None
            del siblings[digest]
            if before is None and not siblings:
                del self._orphans[node.parent]
        self.unreachable.discard(node.entry)
        if node.children:
            self._orphans[digest] = node.children
            if node.reachable:
                self._mark(node, reachable=False)

    def clear(self) -> None:
        """Remove all entries."""
        self.unreachable.clear()
        self._nodes.clear()
        self._orphans.clear()

    def _mark(self, node: _Node, *, reachable: bool) -> None:
        """Change all that is behind a node."""
        behind = [*(node.children or {}).values()]
        while behind:
            node = behind.pop()
            node.reachable = reachable
            if reachable:
                self.unreachable.discard(node.entry)
            else:
                self.unreachable.add(node.entry)
            if node.children:
                behind += node.children.values()
