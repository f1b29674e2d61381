"""The messages in which vLLM publishes events of its prefix cache, made from recorded changes.

A batch is a msgpack array [time, events, rank]. vLLM publishes each event as a map from 0.24 on, and before as an array
of the same values in the same order, of which the last ones may be missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

import msgspec

from engine.core.kv_events.recorder import Change, Cleared, Removed, Stored
from engine.core.schedulers.hash_chain import DIGEST_BYTES
from engine.core.tokens import TOKEN_TYPE
from engine.core.types import BlockKind

HASH = Struct(f">{DIGEST_BYTES - 8}xQ")
"""Unpacks the hash from a digest: the last 8 bytes."""
MEDIUM = "GPU"
"""Where blocks are: vLLM's name for the cache in the memory of the model's own device, whatever device that is."""


class BatchEncoder:
    """Encodes batches. Hashes of blocks are the last 8 bytes of their digests, as unsigned integers."""

    def __init__(self, kinds: Sequence[BlockKind], block_size: int, *, rank: int, arrays: bool) -> None:
        """kinds: CacheInfo.kinds. rank: of the replica, from 0. arrays: encode events as arrays, instead of maps."""
        self._block_size = block_size
        self._rank = rank
        self._arrays = arrays
        self._encoder = msgspec.msgpack.Encoder()
        # Some readers of arrays know no groups, and take what follows extra_keys for something else.
        self._groups = [{} if arrays and len(kinds) == 1 else _group(number, kind) for number, kind in enumerate(kinds)]
        self._removed = [
            {name: value for name, value in group.items() if name == "group_idx"} for group in self._groups
        ]
        """By kind, the fields of removed blocks that say which layers the blocks are for."""

    def encode(self, seconds: float, changes: Sequence[Change]) -> bytes:
        """One batch. seconds: time.time() of the changes."""
        events: list[Any] = [self._event(change) for change in changes]
        if self._arrays:
            events = [_as_array(event) for event in events]
        return self._encoder.encode([seconds, events, self._rank])

    def _event(self, change: Change) -> dict[str, Any]:
        match change:
            case Stored():
                return self._stored(change)
            case Removed(kind, digests):
                hashes = _hashes(digests)
                return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, **self._removed[kind]}
            case Cleared():
                return {"type": "AllBlocksCleared"}

    def _stored(self, change: Stored) -> dict[str, Any]:
        salted = change.parent is None and change.salt
        return {
            "type": "BlockStored",
            "block_hashes": _hashes(change.digests),
            "parent_block_hash": None if change.parent is None else block_hash(change.parent),
            "token_ids": array(TOKEN_TYPE, b"".join(change.tokens)).tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            # As in vLLM, the salt is an extra key of the first block of a sequence.
            "extra_keys": [[change.salt], *[None] * (len(change.digests) - 1)] if salted else None,
            **self._groups[change.kind],
        }


def block_hash(digest: bytes) -> int:
    """The hash by which readers know a block."""
    (found,) = HASH.unpack(digest)
    return int(found)


def _hashes(digests: Sequence[bytes]) -> list[int]:
    return [found for (found,) in HASH.iter_unpack(b"".join(digests))]


def _group(number: int, kind: BlockKind) -> dict[str, Any]:
    """The fields that say which layers a block is for."""
    latent = kind.name == "latent"
    if kind.window is None:
        return {"group_idx": number, "kv_cache_spec_kind": "mla_attention" if latent else "full_attention"}
    return {
        "group_idx": number,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": kind.window,
    }


def _as_array(event: dict[str, Any]) -> list[Any]:
    """The values of an event, without the last ones that are None."""
    values = list(event.values())
    while values[-1] is None:
        values.pop()
    return values
