"""Sizes that CUDA graphs are captured for."""

from __future__ import annotations

import pytest

from engine.core.runner.graph_sizes import (
    ALL_RECORDED,
    MIN_GRAPH_TOKENS,
    all_counts_recorded,
    batch_sizes,
    extra_graph_memory,
    find_max_graph_tokens,
    recorded_sizes,
    token_counts,
)


def test_batch_sizes_reach_the_maximum_and_pad_little() -> None:
    for most in (1, 2, 5, 8, 64, 100, 256, 1000, 2048):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for count in range(1, most + 1):
            fits = min(size for size in sizes if size >= count)
            assert fits - count < max(8, count / (4 if count <= 256 else 8))


@pytest.mark.parametrize("most", [10, 64, 100, 1000, 1024, 3003, 8192, 10_000])
def test_token_counts_reach_the_maximum_and_pad_little(most: int) -> None:
    counts = token_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    for tokens in range(1, most + 1):
        fits = min(count for count in counts if count >= tokens)
        assert fits - tokens < (64 if tokens <= 512 else max(128, tokens / 8))


@pytest.mark.parametrize(
    ("launch", "seconds", "expected"),
    [
        (0.020, 0.0215, 8192),  # the host takes longer than the device
        (0.011, 0.020, 8192),  # it does once its launches take twice as long, or nearly
        (0.0075, 0.0199, 8192),  # and with the time of planning
        (0.0075, 0.0200, 3328),
        (0.037, 0.111, 2944),  # 1.1 / 3 of 8192, in whole 64
        (0.005, 0.100, MIN_GRAPH_TOKENS),
        (0.030, 0.029, 8192),  # clocks are not exact
    ],
)
def test_steps_have_graphs_until_they_take_the_device_as_long_as_the_host(
    launch: float, seconds: float, expected: int
) -> None:
    assert find_max_graph_tokens(8192, launch, seconds) == expected


def test_graphs_are_not_larger_than_the_largest_step() -> None:
    assert find_max_graph_tokens(100, 0.010, 0.011) == 100


def test_extra_graph_memory_is_that_of_the_largest_graph_beyond_the_usual_ones() -> None:
    assert extra_graph_memory(0, 8192) == 0
    assert extra_graph_memory(MIN_GRAPH_TOKENS, 8192) == 0
    assert extra_graph_memory(MIN_GRAPH_TOKENS + 2048, 8192) == 0.25
    assert extra_graph_memory(512, 512) == 0


def test_recorded_sizes_are_the_small_the_powers_of_two_and_the_largest() -> None:
    sizes = batch_sizes(1000)
    recorded = recorded_sizes(sizes, ALL_RECORDED)
    assert recorded == [*(size for size in sizes if size <= 64), 128, 256, 512, 1000]
    assert recorded_sizes([3], ALL_RECORDED) == [3]
    assert recorded_sizes(token_counts(3000), MIN_GRAPH_TOKENS) == [*token_counts(1024), 2048, 3000]


def test_more_numbers_of_tokens_have_kernels_of_their_own_where_large_gemms_are_autotuned() -> None:
    assert all_counts_recorded([]) == 256
    assert all_counts_recorded([1, 64, 128]) == 256
    assert all_counts_recorded([4096, 64]) == 1024
