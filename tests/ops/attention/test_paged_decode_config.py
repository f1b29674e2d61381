"""Launch parameters of decode attention: what fits a GPU, and which preset a batch takes."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import triton

from engine.ops.attention.paged_decode_config import DecodeConfig, decode_configs, folded_heads
from engine.ops.attention.paged_decode_merge import merge_size


@pytest.mark.parametrize("shared_memory", [65536, 102400, 167936, 233472])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
def test_decode_configs_fit_a_multiprocessor(head_dim: int, itemsize: int, shared_memory: int) -> None:
    configs = decode_configs(head_dim, itemsize, shared_memory, (32, 8))
    for _, config in configs:
        row = triton.next_power_of_2(head_dim) * itemsize * config.fold
        tiles, others = (config.num_stages - 1) * 2 * config.block_n * row, 4096 if itemsize > 1 else 1024 + 16 * row
        fits = config.programs_per_sm * (tiles + others) <= shared_memory
        assert fits or (config.num_stages, config.programs_per_sm) == (2, 1)
        assert config.block_n in (16, 32, 64, 128)
    limits = [limit for limit, _ in configs]
    assert limits == sorted(limits)
    assert limits[-1] == float("inf")


def test_decode_configs_equal_the_presets_with_the_shared_memory_of_an_h200() -> None:
    """228 KB per multiprocessor, heads of 128."""
    assert [attrs.astuple(config) for _, config in decode_configs(128, 2, 233472, (32, 8))] == [
        (32, 4, 4, 1, 1, 2, 1, 0, False),
        (64, 4, 4, 2, 1, 4, 1, 2, False),
        (64, 2, 2, 4, 1, 2, 1, 1, False),
        (16, 1, 3, 8, 1, 16, 1, 1, False),
    ]
    assert [attrs.astuple(config) for _, config in decode_configs(128, 1, 233472, (32, 8))] == [
        (128, 4, 3, 2, 1, 2, 2, 2, False),
        (64, 2, 3, 4, 1, 4, 1, 1, False),
        (32, 1, 2, 8, 2, 2, 1, 1, False),
    ]
    assert attrs.astuple(decode_configs(128, 1, 233472, (64, 8))[-1][1]) == (64, 1, 2, 8, 1, 2, 1, 1, False)


def test_decode_configs_of_small_results_have_small_programs_from_fewer_sequences_on() -> None:
    """Two query heads of 128 per KV head, not three."""
    small, large = (decode_configs(128, 2, 233472, (group * 8, 8)) for group in (2, 3))
    assert [(limit, config.num_warps, config.extra_tiles) for limit, config in small[1:]] == [
        (15.875, 4, 4),
        (49.875, 1, 16),
        (66, 1, 8),
        (math.inf, 1, 16),
    ]
    assert [(limit, config.num_warps) for limit, config in large[1:]] == [(15.875, 4), (96, 2), (math.inf, 1)]
    small, large = (decode_configs(64, 2, 233472, (group * 8, 8)) for group in (2, 3))
    assert [limit for limit, _ in small] == [1, 5.875, 15.875, math.inf]
    assert [limit for limit, _ in large] == [1, 5.875, 15.875, 49.875, math.inf]


@pytest.mark.parametrize(
    ("dim", "heads", "stages"), [(128, (32, 32), 4), (128, (16, 8), 3), (64, (32, 32), 3), (64, (31, 31), 4)]
)
def test_decode_configs_of_a_float8_cache_have_a_fourth_stage_for_one_query_head(
    dim: int, heads: Any, stages: int
) -> None:
    """Of all folded KV heads: an odd number of heads of 64 is not folded."""
    assert decode_configs(dim, 1, 233472, heads)[0][1].num_stages == stages


@pytest.mark.parametrize("heads", [(8, 8), (32, 8)])
def test_decode_configs_of_wide_heads_have_at_least_two_warps(heads: Any) -> None:
    """The sums of 16 rows of 256 do not fit into the registers of one warp."""
    configs = decode_configs(256, 2, 233472, heads)
    assert [(limit, config.num_warps) for limit, config in configs] == [(1, 4), (15.875, 4), (math.inf, 2)]


@pytest.mark.parametrize(
    ("dim", "heads", "launches"),
    [
        (128, (64, 8), [(33, 128, 2)]),
        (128, (72, 8), [(9.875, 128, 2), (33, 64, 3)]),
        (64, (32, 8), [(33, 128, 2)]),
        (64, (40, 8), [(9.875, 128, 2), (33, 64, 3)]),
    ],
)
def test_decode_configs_of_a_float8_cache_have_small_tiles_for_many_query_heads(
    dim: int, heads: Any, launches: list[tuple[float, int, int]]
) -> None:
    """From nine query heads per program on; two KV heads of 64 are folded, but for few sequences."""
    configs = decode_configs(dim, 1, 233472, heads)[: len(launches)]
    assert [(limit, config.block_n, config.programs_per_sm) for limit, config in configs] == launches


@pytest.mark.parametrize(
    ("head_bytes", "heads", "row_bytes", "min_m", "fold"),
    [
        (128, (32, 8), 128, 8, 1),
        (128, (32, 8), 256, 8, 2),
        (128, (64, 8), 256, 8, 1),
        (128, (64, 8), 256, 16, 2),
        (128, (72, 8), 256, 16, 1),
        (128, (12, 3), 256, 8, 1),
        (64, (32, 8), 256, 8, 2),
        (64, (16, 8), 256, 8, 4),
        (64, (64, 8), 256, 8, 2),
        (64, (8, 1), 256, 8, 1),
        (16, (16, 16), 128, 8, 8),
        (256, (8, 8), 256, 16, 1),
    ],
)
def test_folded_heads_fills_rows_and_padding(
    head_bytes: int, heads: Any, row_bytes: int, min_m: int, fold: int
) -> None:
    assert folded_heads(head_bytes, heads, row_bytes, min_m) == fold


@pytest.mark.parametrize(
    ("dim", "kv_heads", "limits"),
    [
        (128, 8, [1, 15, 96, math.inf]),
        (128, 4, [2, 31, 192, math.inf]),
        (128, 16, [1, 7, 48, math.inf]),
        (128, 128, [1, 6, math.inf]),
        (64, 8, [1, 5, 15, 49, math.inf]),
        (64, 3, [2, 15, 42, 133, math.inf]),
    ],
)
def test_decode_configs_count_pairs_of_sequences_and_kv_heads(dim: int, kv_heads: int, limits: list[float]) -> None:
    """Presets for less than one sequence are left out."""
    found = decode_configs(dim, 2, 233472, (4 * kv_heads, kv_heads))
    assert [limit if limit == math.inf else int(limit) for limit, _ in found] == limits


def test_decode_configs_of_narrow_heads_fold_kv_heads_of_large_batches() -> None:
    """Heads of 64 in 16 bits, on an H200."""
    assert [attrs.astuple(config) for _, config in decode_configs(64, 2, 233472, (32, 8))] == [
        (64, 4, 4, 1, 1, 2, 1, 0, True),
        (128, 4, 4, 2, 1, 2, 1, 0, False),
        (64, 4, 4, 3, 1, 5, 1, 1, False),
        (64, 4, 4, 3, 1, 10, 1, 1, False),
        (16, 1, 3, 8, 2, 16, 1, 1, False),
    ]
    assert {config.fold for _, config in decode_configs(64, 2, 233472, (18, 3))} == {1}
    assert {config.fold for _, config in decode_configs(64, 2, 233472, (72, 8))} == {1}


@pytest.mark.parametrize(("heads", "fold"), [((32, 8), 2), ((40, 8), 1), ((64, 8), 1), ((14, 2), 1)])
def test_decode_configs_of_a_float8_cache_fold_up_to_eight_query_heads_for_few_sequences(heads: Any, fold: int) -> None:
    """Up to 79 pairs of sequences and KV heads of 64; up to 16 query heads for more."""
    (_, few), *_, (_, many) = decode_configs(64, 1, 233472, heads)
    assert (few.block_n, few.num_warps, few.fold) == (128, 4, fold)
    assert many.fold == 2


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_decode_configs_list_every_size_of_batches_once(head_dim: int, itemsize: int) -> None:
    for kv_heads in (1, 3, 8, 20, 128):
        for group in (1, 2, 4, 7, 12, 32):
            limits = [limit for limit, _ in decode_configs(head_dim, itemsize, 233472, (group * kv_heads, kv_heads))]
            assert limits == sorted(set(limits))
            assert limits[-1] == math.inf


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_merge_size_takes_at_most_half_of_the_registers(programs: int) -> None:
    config = DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=programs)
    for dim in (64, 128, 256):
        count = merge_size(4, dim, config)
        assert count == 1 or count * 4 * dim <= 128 * config.max_registers() // 2
    assert merge_size(1, 16, config) == 16


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotates"),
    [((16, 8), 128, True), ((4, 1), 128, True), ((16, 8), 64, True), ((32, 8), 128, False), ((8, 4), 256, False)],
)
def test_decode_of_one_sequence_rotates_where_that_is_faster(
    heads: tuple[int, int], head_dim: int, rotates: bool
) -> None:
    (_, first), *others = decode_configs(head_dim, 2, 233472, heads)
    assert first.rotates == rotates
    assert not any(config.rotates for _, config in others)
    assert not any(config.rotates for _, config in decode_configs(head_dim, 1, 233472, heads))
