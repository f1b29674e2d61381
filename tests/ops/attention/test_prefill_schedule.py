"""Schedules of persistent_short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.ops.attention.paged_prefill import prefill_tiles
from engine.ops.attention.prefill_schedule import prefill_schedule


def tiles_of(lengths: tuple[tuple[int, int], ...], tokens: int) -> Any:
    """Tiles of (cached, new) per sequence."""
    queries = np.array([new for _, new in lengths], np.int32)
    contexts = np.array([cached + new for cached, new in lengths], np.int32)
    return prefill_tiles(queries, contexts, np.arange(len(lengths)), tokens)


def work_of(schedule: Any, block_n: int, window: int | None = None) -> Any:
    """Blocks of keys of each turn and program."""
    position, tokens = schedule[1:, :, 1], schedule[1:, :, 3]
    begin = 0 if window is None else np.maximum(position + 1 - window, 0) // block_n
    return np.where(tokens > 0, -(-(position + tokens) // block_n) - begin, 0)


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize(
    "lengths", [((0, 1),), ((0, 300), (100, 77), (0, 25)), ((0, 464),) * 4, ((0, 300),) * 16], ids=len
)
def test_schedule_has_each_tile_and_head_once_and_counts_them_by_program(
    lengths: tuple[tuple[int, int], ...], kv_heads: int, programs: int
) -> None:
    tiles = tiles_of(lengths, 25)
    schedule = prefill_schedule(tiles, kv_heads, programs, 64)
    counts = schedule[0, :, 0]
    assert schedule.shape == (2 + counts.max(), min(programs, len(tiles) * kv_heads), 4)
    assert counts.min() >= 1
    inside = np.arange(len(schedule) - 1)[:, None] < counts
    assert (schedule[1:][~inside] == 0).all()
    expected = [[sequence * kv_heads + head, *rest] for sequence, *rest in tiles.tolist() for head in range(kv_heads)]
    assert sorted(schedule[1:][inside].tolist()) == sorted(expected)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [((0, 464), (0, 312), (0, 250), (0, 377)), ((0, 300),) * 16, ((700, 130),) * 5])
def test_schedule_gives_programs_equal_work(lengths: tuple[tuple[int, int], ...], window: int | None) -> None:
    tiles, kv_heads, programs = tiles_of(lengths, 25), 5, 132
    work = work_of(prefill_schedule(tiles, kv_heads, programs, 64, window=window), 64, window)
    load = work.sum(0)
    assert load.max() <= load.mean() + work.max()
    in_order = np.sort(work[work > 0])[::-1]
    turns = [np.pad(in_order[begin : begin + programs], (0, programs)) for begin in range(0, len(in_order), programs)]
    in_turns = sum(turn[:programs][:: 1 - number % 2 * 2] for number, turn in enumerate(turns))
    assert load.max() <= in_turns.max()
