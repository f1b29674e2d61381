"""When 2 to 8 rows of x are multiplied by fine tiles, and into how many programs these are split."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engine.ops.gemm.packed_layout import GroupedLayout, W8Layout
from engine.ops.gemm.weight_only_tiles import (
    FINE_TILE,
    FINEST_TILE,
    LARGE_TILE,
    MAX_FINEST_WEIGHTS,
    MAX_SPLITS,
    PREFETCHED_BLOCKS,
    PROGRAMS_PER_SM,
    PROGRAMS_PER_SM_OF_FINEST_TILE,
    PROGRAMS_PER_SM_OF_SMALL_WEIGHTS,
    SMALL_WEIGHTS,
    WeightOnlyShape,
    WeightOnlyTile,
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
        (INT8, 4096, 4096, 2),
        (INT8, 4096, 14336, 3),
        (INT8, 5120, 5120, 3),  # with 2, too few
        (INT8, 2752, 15040, 5),
        (INT8, 10240, 8192, 1),  # with 2, too many
        (FOUR, 4096, 4096, 3),
        (FOUR, 6144, 4096, 2),
    ],
)
def test_fine_tiles_are_split_where_they_are_few(layout: Any, outputs: int, inputs: int, splits: int) -> None:
    shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    tile = fine_tile(shape, 4, SMS)
    assert tile.splits == splits
    is_finest = layout is INT8 and shape.weight_bytes <= MAX_FINEST_WEIGHTS
    assert tile.rows == (FINEST_TILE if is_finest else FINE_TILE).rows
    is_small = layout is FOUR and shape.weight_bytes < SMALL_WEIGHTS
    most = PROGRAMS_PER_SM_OF_SMALL_WEIGHTS if is_small else PROGRAMS_PER_SM + 1
    if is_finest:
        assert tile.ahead == FINEST_TILE.ahead
        most = PROGRAMS_PER_SM_OF_FINEST_TILE
    else:
        assert tile.ahead == (PREFETCHED_BLOCKS[layout.bits] if is_small else 0)
    assert splits == 1 or tile.programs(shape, 4) * splits <= most * SMS
    assert default_tile(shape, 4, SMS, HOPPER) == tile


@pytest.mark.parametrize(
    ("gated", "outputs", "is_fine"),
    [(False, 8192, True), (False, 8224, False), (True, 16384, True), (True, 16448, False)],
)
def test_large_4_bit_weights_are_not_multiplied_by_fine_tiles(gated: bool, outputs: int, is_fine: bool) -> None:
    shape = WeightOnlyShape(gated=gated, weight_rows=outputs, inputs=4096, layout=FOUR)
    tile = default_tile(shape, 4, SMS, HOPPER)
    assert isinstance(tile, WeightOnlyTile)
    assert (tile.rows == FINE_TILE.rows) == is_fine
