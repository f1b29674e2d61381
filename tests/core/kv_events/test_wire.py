"""The bytes of a batch are those that vLLM publishes: as maps, and as the arrays of older versions."""

from __future__ import annotations

import msgspec
import pytest

from engine.core.kv_events.recorder import Change, Cleared, Removed, Stored
from engine.core.kv_events.wire import BatchEncoder
from engine.core.tokens import packed
from engine.core.types import FULL, BlockKind

FIRST, SECOND, PARENT = (bytes(8) + number.to_bytes(8) for number in (2**63 + 1, 2, 3))
WINDOW = BlockKind(name="window 8", window=8)


def decoded(change: Change, *, kinds: tuple[BlockKind, ...] = (FULL,), arrays: bool = False) -> object:
    """The only event of a batch."""
    batch = BatchEncoder(kinds, 2, rank=3, arrays=arrays).encode(1.5, [change])
    seconds, events, rank = msgspec.msgpack.decode(batch)
    assert (seconds, rank, len(events)) == (1.5, 3, 1)
    return events[0]


def stored(kind: int = 0, salt: str = "", parent: bytes | None = PARENT) -> Stored:
    return Stored(kind, parent, salt, [FIRST, SECOND], [packed([1, 2]), packed([3, 4])])


def test_stored_blocks_are_a_map_with_the_names_of_vllm() -> None:
    assert decoded(stored()) == {
        "type": "BlockStored",
        "block_hashes": [2**63 + 1, 2],
        "parent_block_hash": 3,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_stored_blocks_name_the_kind_of_their_layers() -> None:
    event = decoded(stored(kind=1), kinds=(FULL, WINDOW))
    assert isinstance(event, dict)
    assert (event["group_idx"], event["kv_cache_spec_kind"]) == (1, "sliding_window")
    assert event["kv_cache_spec_sliding_window"] == 8
    latent = decoded(stored(), kinds=(BlockKind(name="latent"),))
    assert isinstance(latent, dict)
    assert latent["kv_cache_spec_kind"] == "mla_attention"


@pytest.mark.parametrize(
    ("salt", "parent", "expected"),
    [("", None, None), ("secret", None, [["secret"], None]), ("secret", PARENT, None)],
)
def test_salt_is_an_extra_key_of_the_first_block(salt: str, parent: bytes | None, expected: object) -> None:
    event = decoded(stored(salt=salt, parent=parent))
    assert isinstance(event, dict)
    assert event["extra_keys"] == expected


def test_stored_blocks_are_an_array_without_groups_when_there_is_one_kind() -> None:
    assert decoded(stored(), arrays=True) == ["BlockStored", [2**63 + 1, 2], 3, [1, 2, 3, 4], 2, None, "GPU"]


def test_stored_blocks_are_an_array_with_groups_when_there_are_several_kinds() -> None:
    expected = ["BlockStored", [2**63 + 1, 2], 3, [1, 2, 3, 4], 2, None, "GPU", None, None, 1, "sliding_window", 8]
    assert decoded(stored(kind=1), kinds=(FULL, WINDOW), arrays=True) == expected


@pytest.mark.parametrize("arrays", [False, True])
def test_removed_blocks_name_their_group(arrays: bool) -> None:
    expected = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": 1}
    event = decoded(Removed(1, [SECOND]), kinds=(FULL, WINDOW), arrays=arrays)
    assert event == (list(expected.values()) if arrays else expected)


@pytest.mark.parametrize(("arrays", "expected"), [(False, {"type": "AllBlocksCleared"}), (True, ["AllBlocksCleared"])])
def test_cleared_cache_is_an_event_of_its_own(arrays: bool, expected: object) -> None:
    assert decoded(Cleared(), arrays=arrays) == expected
