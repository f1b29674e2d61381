"""A router that knows of a prefix cache nothing but its events, and reads them as vLLM's readers do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

FIELDS = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
"""Of BlockStored, in the order of the array that older versions of vLLM publish."""
REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx")
END_OF_REPLAY = b"\xff" * 8
Place = tuple[int, int | None, str, tuple[int, ...]]
"""Where a block is in the tree: group, hash of the block before it, salt of a first block, tokens."""


def events(batch: bytes) -> list[dict[str, Any]]:
    """The events of a batch in either encoding, as maps."""
    _, found, _ = msgspec.msgpack.decode(batch)
    return [event if isinstance(event, dict) else _named(event) for event in found]


def _named(event: list[Any]) -> dict[str, Any]:
    return dict(zip(FIELDS if event[0] == "BlockStored" else REMOVED_FIELDS, event, strict=False))


class Router:
    """The blocks in a cache, by group."""

    def __init__(self) -> None:
        self.hashes: dict[Place, int] = {}
        self._places: dict[tuple[int, int], Place] = {}

    def apply(self, batch: bytes) -> None:
        """Follow one batch."""
        for event in events(batch):
            group = event.get("group_idx") or 0
            match event["type"]:
                case "BlockStored":
                    self._store(event, group)
                case "BlockRemoved":
                    for number in event["block_hashes"]:
                        del self.hashes[self._places.pop((group, number))]
                case "AllBlocksCleared":
                    self.hashes.clear()
                    self._places.clear()

    def known(self) -> set[tuple[int, int]]:
        """Group and hash of all blocks in the cache."""
        return set(self._places)

    def prefix(self, tokens: Sequence[int], block_size: int, salt: str, group: int = 0) -> list[int]:
        """Hashes of the blocks with which these tokens begin."""
        found: list[int] = []
        for begin in range(0, len(tokens) - block_size + 1, block_size):
            block = tuple(tokens[begin : begin + block_size])
            place = (group, found[-1], "", block) if found else (group, None, salt, block)
            if place not in self.hashes:
                break
            found.append(self.hashes[place])
        return found

    def _store(self, event: dict[str, Any], group: int) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        extra = event.get("extra_keys")
        salt = extra[0][0] if extra else ""
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for index, number in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
            place = (group, parent, salt if parent is None else "", tokens)
            assert place not in self.hashes, "a block is stored twice"
            assert (group, number) not in self._places, "a hash is stored twice"
            self.hashes[place] = number
            self._places[group, number] = place
            parent = number


class Subscriber:
    """A reader of the endpoints `events` and `replay` in a directory, which asks for what it has missed."""

    def __init__(self, context: zmq.Context[Any], directory: Path, topic: bytes = b"") -> None:
        self.router = Router()
        self.seen = -1
        self.types: list[str] = []
        self._sub, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.connect(f"ipc://{directory}/events")
        self._replay.connect(f"ipc://{directory}/replay")

    def catch_up(self) -> None:
        """Apply all batches that are kept, and are not seen yet."""
        self._replay.send_multipart((b"", (self.seen + 1).to_bytes(8, "big")))
        while True:
            assert self._replay.poll(30_000)
            _, sequence, batch = self._replay.recv_multipart()
            if sequence == END_OF_REPLAY:
                return
            self._apply(sequence, batch)

    def read(self) -> bool:
        """Apply a batch that has come, or those missed before it; False if none has."""
        if not self._sub.poll(20):
            return False
        _, sequence, batch = self._sub.recv_multipart()
        number = int.from_bytes(sequence, "big")
        if number > self.seen + 1:
            self.catch_up()
        if number > self.seen:
            self._apply(sequence, batch)
        return True

    def close(self) -> None:
        self._sub.close(linger=0)
        self._replay.close(linger=0)

    def _apply(self, sequence: bytes, batch: bytes) -> None:
        assert int.from_bytes(sequence, "big") == self.seen + 1
        self.seen += 1
        self.router.apply(batch)
        self.types += [event["type"] for event in events(batch)]
