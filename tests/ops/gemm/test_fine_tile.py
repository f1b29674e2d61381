"""When 2 to 8 rows of x are multiplied by fine tiles, and into how many programs these are split."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engine.ops.gemm.packed_layout import GroupedLayout, W8Layout
from engine.ops.gemm.weight_only_tiles import (
    FINE_TILE,
    LARGE_TILE,
    MAX_SPLITS,
    PREFETCHED_BLOCKS,
    PROGRAMS_PER_SM,
    PROGRAMS_PER_SM_OF_SMALL_WEIGHTS,
    SMALL_WEIGHTS,
    WeightOnlyShape,
    default_tile,
    fine_tile,
    with_even_splits,
)

HOPPER = 227 * 2**10
"""Bytes of shared memory."""
SMS = 132
INT8 = W8Layout(dtype="int8")
FOUR = GroupedLayout.choose(4, 128)


@pytest.mark.parametrize("gated", [False, True])
def test_w8_tile_of_many_outputs_is_fine_when_gated(gated: bool) -> None:
    shape = WeightOnlyShape(gated=gated, weight_rows=28672, inputs=4096, layout=W8Layout(dtype="int8"))
    assert default_tile(shape, 2, 132, HOPPER) == evolve(FINE_TILE if gated else LARGE_TILE, step=128)
    assert default_tile(shape, 1, 132, HOPPER) == evolve(LARGE_TILE, step=128)


@pytest.mark.parametrize("inputs", [128, 640, 1152, 4992, 15040])
@pytest.mark.parametrize("outputs", [512, 1536, 2752, 12352])
def test_even_splits_leave_no_program_without_work(outputs: int, inputs: int) -> None:
    shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=W8Layout(dtype="int8"))
    for most in (100, 264, 528):
        tile = with_even_splits(FINE_TILE, shape, 2, most)
        programs = tile.programs(shape, 2)
        assert tile.splits == 1 or programs * tile.splits <= most
        blocks_per_split = -(-shape.blocks // tile.splits)
        assert (tile.splits - 1) * blocks_per_split < shape.blocks
        more = tile.splits + 1
        could_split = programs * more <= most and more <= MAX_SPLITS
        assert not could_split or -(-shape.blocks // more) == blocks_per_split


@pytest.mark.parametrize(
    ("layout", "outputs", "inputs", "splits"),
    [
        (INT8, 256, 256, 1),  # too few inputs
        (INT8, 1024, 1024, 4),
        (FOUR, 1024, 3072, 4),
        (INT8, 4096, 1024, 1),  # most multiprocessors have a tile
        (FOUR, 4096, 1024, 1),
        (INT8, 2688, 2688, 3),
        (INT8, 4096, 4096, 3),
        (INT8, 2752, 15040, 4),
    ],
)
def test_fine_tiles_are_split_where_they_are_few(layout: Any, outputs: int, inputs: int, splits: int) -> None:
    shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    tile = fine_tile(shape, 4, SMS)
    assert tile.splits == splits
    is_small = shape.weight_bytes < SMALL_WEIGHTS
    assert tile.ahead == (PREFETCHED_BLOCKS[layout.bits] if is_small else 0)
    most = PROGRAMS_PER_SM_OF_SMALL_WEIGHTS if is_small else PROGRAMS_PER_SM
    assert splits == 1 or tile.programs(shape, 4) * splits <= most * SMS
