"""The prefill kernel at the edges of its tiles and blocks, and prefill_tiles; the conformance suite has the rest."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
import triton

from engine.ops.attention.paged_prefill import prefill_order, prefill_tiles
from engine.ops.attention.paged_prefill_config import (
    LIMITED_SHARE,
    MANY_TILES,
    MANY_TILES_ORDERED,
    SHORT_KEYS,
    SHORT_KEYS_OF_MANY,
    SHORT_KEYS_OF_MANY_NARROW,
    SHORT_KEYS_OF_MANY_ORDERED,
    SHORT_KEYS_OF_WINDOW,
    SHORT_KEYS_ORDERED,
    PrefillConfig,
    PrefillWork,
    persistent_config,
    prefill_config,
)

from .prefill import check

pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]

# Chunks that begin and end at, before and after the edges of a block of keys and a tile of tokens.
EDGES = ((0, 1), (0, 16), (0, 17), (15, 16), (16, 33), (31, 2), (100, 1))


def test_kernel_handles_chunks_at_tile_edges() -> None:
    check(EDGES)


@pytest.mark.parametrize("window", [None, 10])
def test_prefill_adds_sinks(window: int | None) -> None:
    check(((5, 20), (0, 1), (40, 3)), heads=(6, 2), window=window, has_sinks=True)


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_kernel_handles_windows_at_tile_edges(window: int) -> None:
    check(EDGES, window=window)


def test_kernel_applies_a_soft_cap() -> None:
    check(((20, 30),), softcap=1.5)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_kernel_handles_groups_that_do_not_fill_a_tile(group: int) -> None:
    check(((9, 12), (0, 5)), heads=(2 * group, 2))


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_kernel_handles_head_dims_that_are_multiples_of_16(dim: int) -> None:
    check(((9, 12),), dim=dim)


@pytest.mark.parametrize("config", [(16, 64, 4, 2), (64, 16, 4, 3), (128, 64, 8, 3)])
def test_kernel_is_correct_for_each_config(config: Any) -> None:
    m, n, warps, stages = config
    chosen = PrefillConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
    check(((40, 75),), config=chosen, dtype=torch.float16)


def work(longest: int) -> PrefillWork:
    """One prompt."""
    return PrefillWork(longest=longest, keys=longest / 2, tiles=1)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("longest", [16, 700])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernel_is_correct_for_the_chosen_config(dim: int, longest: int, window: int | None) -> None:
    config = prefill_config(work(longest), 4, dim, 2, 233472)
    check(((333, longest), (0, 7)), heads=(8, 2), dim=dim, config=config, dtype=torch.bfloat16, window=window)


def test_kernel_reads_a_float8_cache() -> None:
    check(((20, 30),), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)


def test_kernel_multiplies_values_by_their_scale() -> None:
    check(((20, 30), (0, 5)), kv_dtype=torch.float8_e4m3fn, value_scale=0.37)


def test_prefill_tiles_cover_each_new_token_once_the_most_work_first() -> None:
    queries = np.array([1, 5, 8, 9], np.int32)
    contexts = np.array([70, 5, 20, 9], np.int32)
    assert prefill_tiles(queries, contexts, np.array([1, 2, 3]), 4).tolist() == [
        [2, 16, 10, 4],
        [2, 12, 6, 4],
        [3, 8, 22, 1],
        [3, 4, 18, 4],
        [1, 4, 5, 1],
        [1, 0, 1, 4],
        [3, 0, 14, 4],
    ]
    assert prefill_tiles(queries, contexts, np.array([1, 3]), 8).tolist() == [
        [3, 8, 22, 1],
        [3, 0, 14, 8],
        [1, 0, 1, 5],
    ]


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("tokens", [18, 25, 32, 42, 128])
def test_prefill_tiles_of_a_sequence_begin_earlier_where_that_saves_blocks(tokens: int, block_n: int) -> None:
    def blocks(tiles: Any) -> int:
        return int((-(-tiles[:, 1:].sum(1, where=[True, False, True]) // block_n)).sum())

    moved = 0
    for cached in (0, 70):
        for new in range(1, 400, 7):
            queries, contexts = np.array([3, new], np.int32), np.array([9, cached + new], np.int32)
            tiles = [prefill_tiles(queries, contexts, np.array([1]), tokens, *more) for more in ((), (block_n,))]
            assert len(tiles[0]) == len(tiles[1])
            rows = [range(row, row + count) for _, _, row, count in tiles[1].tolist()]
            assert sorted(row for part in rows for row in part) == list(range(3, 3 + new))
            assert (tiles[1][:, 1] - tiles[1][:, 2] == cached - 3).all()
            assert tiles[1][:, 3].max() <= tokens
            if (tiles[0] == tiles[1]).all():
                continue
            assert blocks(tiles[1]) < blocks(tiles[0])
            moved += 1
    assert moved > 0


def test_prefill_tiles_stay_where_blocks_end_with_tiles() -> None:
    for new in range(1, 400):
        lens = np.array([new], np.int32)
        assert (
            prefill_tiles(lens, lens, np.array([0]), 32, 64).tolist()
            == prefill_tiles(lens, lens, np.array([0]), 32).tolist()
        )


def tiles_of(lengths: tuple[tuple[int, int], ...], tokens: int = 32) -> Any:
    """Tiles of (cached, new) per sequence."""
    queries = np.array([new for _, new in lengths], np.int32)
    contexts = np.array([cached + new for cached, new in lengths], np.int32)
    return prefill_tiles(queries, contexts, np.arange(len(lengths)), tokens)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "lengths", [((0, 2048),) * 4, ((10_000, 8192),), ((0, 5000), (300, 800), (0, 1)), ((0, 20_000),)]
)
def test_prefill_order_has_each_item_once_and_gives_programs_equal_work(
    lengths: tuple[tuple[int, int], ...], kv_heads: int
) -> None:
    tiles, programs = tiles_of(lengths), 20
    order = prefill_order(tiles, kv_heads, programs)
    assert order is not None
    items = len(tiles) * kv_heads
    assert order.shape == (-(-items // programs), programs)
    assert sorted(order.ravel().tolist()) == sorted([*range(items), *[items] * (order.size - items)])
    assert (order[:-1] < items).all()
    work = np.append(np.repeat(-(-(tiles[:, 1] + tiles[:, 3]) // 128) + 1, kv_heads), 0)
    load = work[order].sum(0)
    assert load.max() <= 1.1 * load.mean()


def test_prefill_order_computes_few_sequences_and_heads_at_the_same_time() -> None:
    tiles, kv_heads, programs = tiles_of(((0, 2048),) * 16), 8, 132
    order = prefill_order(tiles, kv_heads, programs)
    assert order is not None
    longest = order[:40]  # the shortest tiles of all come last
    used = [{(tiles[item // kv_heads, 0], item % kv_heads) for item in row} for row in longest.tolist()]
    assert max(map(len, used)) <= 6  # of 128


def test_prefill_order_is_none_for_few_items_per_program() -> None:
    tiles = tiles_of(((0, 1024),))
    assert prefill_order(tiles, 8, 132) is None
    assert prefill_order(tiles, 8, 132, min_turns=0) is not None


@pytest.mark.parametrize("shared_memory", [65536, 102400, 167936, 233472])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_prefill_config_fits_shared_memory_and_at_least_one_token(
    group: int, itemsize: int, shared_memory: int
) -> None:
    for longest in (1, 16, 5000):
        config = prefill_config(work(longest), group, 128, itemsize, shared_memory)
        assert config.tokens(group) >= 1
        assert config.block_m & (config.block_m - 1) == 0
        assert (config.block_m + 2 * config.num_stages * config.block_n) * 128 * itemsize < shared_memory
    assert prefill_config(work(5000), 4, 128, 2, 233472).block_m == 128
    assert prefill_config(work(16), 4, 128, 2, 233472).block_m == 64


def test_prefill_config_is_persistent_for_long_prompts_only() -> None:
    for dim in (64, 128):
        for keys in (9, 5000):
            of_17 = attrs.evolve(work(17), keys=keys)
            assert prefill_config(of_17, 4, dim, 2, 233472, persistent=True) == persistent_config(dim, of_17)
    assert prefill_config(work(16), 4, 128, 2, 233472, persistent=True) == prefill_config(work(16), 4, 128, 2, 233472)


@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_config_has_as_many_keys_in_flight_in_smaller_blocks_for_few_keys(dim: int) -> None:
    def choose(keys: float, tiles: float, ordered: bool = False) -> PrefillConfig:
        return persistent_config(dim, PrefillWork(longest=100, keys=keys, tiles=tiles, ordered=ordered))

    short, long = choose(SHORT_KEYS, 1), choose(SHORT_KEYS + 1, 1)
    assert (short.block_n, short.across_tiles, long.block_n, long.across_tiles) == (64, True, 128, False)
    assert short.block_n * short.num_stages == long.block_n * long.num_stages
    most = SHORT_KEYS_OF_MANY_NARROW if dim == 64 else SHORT_KEYS_OF_MANY
    assert choose(most, MANY_TILES) == short
    assert choose(most + 1, MANY_TILES) == long
    assert choose(SHORT_KEYS_ORDERED, 1, True) == short
    assert choose(SHORT_KEYS_ORDERED + 1, MANY_TILES, True) == long
    assert choose(SHORT_KEYS_OF_MANY_ORDERED, MANY_TILES_ORDERED, True) == short
    assert choose(SHORT_KEYS_OF_MANY_ORDERED + 1, MANY_TILES_ORDERED, True) == long


def test_persistent_config_has_smaller_blocks_for_more_keys_where_a_window_limits_them() -> None:
    def choose(keys: float, limited: float) -> PrefillConfig:
        return persistent_config(64, PrefillWork(longest=100, keys=keys, tiles=9, limited=limited))

    assert choose(SHORT_KEYS_OF_WINDOW, LIMITED_SHARE).across_tiles
    assert not choose(SHORT_KEYS_OF_WINDOW + 1, LIMITED_SHARE).across_tiles
    assert not choose(SHORT_KEYS_OF_WINDOW, LIMITED_SHARE / 2).across_tiles


def test_prefill_work_counts_what_each_new_token_sees_and_tiles_of_sequences() -> None:
    queries, contexts = np.array([1, 5, 3, 40], np.int32), np.array([8, 5, 100, 40], np.int32)
    seen = [8, 1, 2, 3, 4, 5, 98, 99, 100, *range(1, 41)]
    found = PrefillWork.of(queries, contexts, group=4, kv_heads=3, sms=10)
    assert found == PrefillWork(longest=40, keys=sum(seen) / len(seen), tiles=5 * 3 / 10)
    for window in (1, 30, 500):
        windowed = PrefillWork.of(queries, contexts, group=16, kv_heads=3, sms=10, window=window)
        assert windowed.keys == sum(min(keys, window + 8) for keys in seen) / len(seen)
        assert windowed.limited == sum(keys > window + 8 for keys in seen) / len(seen)
        assert windowed.tiles == 8 * 3 / 10
    large = PrefillWork.of(np.array([60_000], np.int32), np.array([120_000], np.int32), group=4, kv_heads=8, sms=1)
    assert large.keys == 90_000.5
    assert large.tiles == 15_000
