"""Sizes that CUDA graphs are captured for."""

from __future__ import annotations

from engine.core.runner.graph_sizes import MAX_TOKENS, batch_sizes, recorded_sizes, token_counts


def test_batch_sizes_reach_the_maximum_and_pad_little() -> None:
    for most in (1, 2, 5, 8, 64, 100, 256, 1000, 2048):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for count in range(1, most + 1):
            fits = min(size for size in sizes if size >= count)
            assert fits - count < max(8, count / (4 if count <= 256 else 8))


def test_token_counts_pad_little() -> None:
    counts = token_counts(10_000)
    assert counts[-1] == MAX_TOKENS
    for tokens in range(1, counts[-1] + 1):
        fits = min(count for count in counts if count >= tokens)
        assert fits - tokens < max(64, fits // 4)
    assert token_counts(100) == [64]


def test_recorded_sizes_are_the_small_the_powers_of_two_and_the_largest() -> None:
    sizes = batch_sizes(1000)
    recorded = recorded_sizes(sizes)
    assert recorded == [*(size for size in sizes if size <= 64), 128, 256, 512, 1000]
    assert recorded_sizes([3]) == [3]
