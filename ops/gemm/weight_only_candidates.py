"""Candidate tiles of the weight-only kernels for autotuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import evolve

from engine.ops.gemm.few_rows_tile import FewRowsTile, few_rows_tile
from engine.ops.gemm.persistent_tile import PersistentTile, tile_for_rows
from engine.ops.gemm.weight_only_tiles import (
    MAX_SPLITS,
    PERSISTENT_ROWS,
    SMALL_WEIGHTS,
    MeasuredTile,
    WeightOnlyShape,
    WeightOnlyTile,
    fits_workspace,
    for_layout,
    tensor_core_tile,
    with_even_splits,
    with_splits,
)

MEASURED_CLASSES = (16, 32, 64, 128, 256)
"""The ROW_CLASSES that are measured at start-up. For up to UNMEASURED_MAX_ROWS the time of a layer alone says too
little: the tiles that won alone made a step of Llama-3.1-8B in float8 take 3.39 ms instead of 2.90."""
PERSISTENT_CLASSES = (512, 1024, 4096)
"""The ROW_CLASSES that are measured too where PersistentTiles can be used. More rows use the choice of the last."""
PERSISTENT_SIZES: Mapping[int, Sequence[tuple[Literal[128, 256], Literal[32, 64, 128, 256]]]] = {
    32: ((256, 32), (128, 32)),
    64: ((256, 64), (128, 64)),
    128: ((128, 128), (256, 128)),
    256: ((128, 256), (128, 128)),
}
"""Row class -> (rows, columns) of PersistentTiles, the default first; of more rows, as the last."""
PERSISTENT_SPLITS = (2, 4, 8)
MAX_SPLIT_ROWS = 128
"""Up to this many rows of x, PersistentTiles with splits are tried: with more, sums take too long to add."""
SHAPES = {
    16: ((32, 2, 6), (64, 2, 4), (64, 2, 6), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6), (128, 8, 4)),
    32: ((32, 2, 4), (64, 2, 4), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)),
    64: ((128, 4, 3), (128, 8, 3)),
}
"""(rows, warps, stages) of the candidates, by columns."""
SHAPES_SCALED_WEIGHTS = {
    64: ((64, 64, 4, 4, 32), (128, 64, 4, 4, 32)),
    128: ((64, 128, 4, 3, 32), (128, 128, 8, 3, 64)),
    256: ((128, 128, 8, 3, 64),),
}
"""(rows, columns, warps, stages, words of a row per loop iteration) of the candidates that scale weights, by row class.
"""
NARROW_SHAPES = ((64, 16, 4, 6), (64, 32, 4, 4), (64, 64, 4, 3))
"""(rows, columns, warps, stages) of further candidates. x has more rows than such a tile has columns, so that several
tiles multiply by the same weights."""
MAX_NARROW_PROGRAMS_PER_SM = 2
"""Up to this many tiles per multiprocessor, NARROW_SHAPES are tried: with more, unpacking W for each takes too long."""
EVEN_SPLITS_MAX_ROWS = 32
"""Up to this many rows of x, splits that need not be a power of two are tried."""
EVEN_PROGRAMS_PER_SM = (1, 2)
"""Maximum programs per multiprocessor of such splits, which are distributed evenly."""
TRIED_AHEAD = {8: 2, 4: 8}
"""Bits of a weight -> number of blocks to try prefetching, for more rows of x than FINE_TILE serves."""
MIN_ROWS_DOUBLED = 128
"""From this many rows of x on, twice as many splits are tried too: a multiprocessor may run two programs faster than
one."""

MMA_CLASSES = (16, 32)
"""Row classes in which MMA_TILES are tried. At 64 rows they were chosen for two layers of Qwen3-0.6B, but its block
took no less time, and 8 % more at 48."""
MMA_SIDE = 1280
"""Maximum rows or inputs of weights, smaller than SMALL_WEIGHTS, for which MMA_TILES are tried. With larger hidden
sizes only some layers of a model would have them, and decode steps took up to 3 % more."""
MMA_TILES = (
    FewRowsTile(rows=16, warps=4, ahead=1, x_ahead=1, programs=4, columns=16),
    FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=1, programs=3, columns=16),
    FewRowsTile(rows=32, warps=4, ahead=2, x_ahead=2, programs=3, row_warps=2, columns=16),
)
"""Tiles of the kernel for few rows with 16 rows of x, tried next to its default tile, which has MAX_FEW_ROWS."""


def candidates(shape: WeightOnlyShape, rows: int, sms: int, shared: int, *, wgmma: bool = False) -> list[MeasuredTile]:
    """Tiles to measure for one of MEASURED_CLASSES or PERSISTENT_CLASSES, the default first.

    None: dequantize and multiply by cuBLAS. sms, shared, wgmma: as in `default_tile`.
    """
    if not wgmma or not PersistentTile.supports(shape):
        return [*_tensor_core_candidates(shape, rows, sms, shared)]
    if rows < min(PERSISTENT_SIZES):
        return [*_tensor_core_candidates(shape, rows, sms, shared), *_mma_candidates(shape, rows, sms)]
    found: list[MeasuredTile] = [*dict.fromkeys(_persistent_candidates(shape, rows, sms))]
    if rows in PERSISTENT_CLASSES:
        return [*found, None] if rows <= PERSISTENT_ROWS[1] else [None, *found]
    others = _tensor_core_candidates(shape, rows, sms, shared)
    if rows >= PERSISTENT_ROWS[0]:
        return [*found, *others]
    return [others[0], *found, *others[1:], *_mma_candidates(shape, rows, sms)]


def _mma_candidates(shape: WeightOnlyShape, rows: int, sms: int) -> Iterator[FewRowsTile]:
    """Tiles of the kernel for few rows, which multiplies by mma.sync from registers; none unless weights are small."""
    is_small = min(shape.weight_rows, shape.inputs) <= MMA_SIDE and shape.weight_bytes < SMALL_WEIGHTS
    if rows not in MMA_CLASSES or not is_small:
        return
    yield few_rows_tile(shape, sms)
    yield from MMA_TILES


def _persistent_candidates(shape: WeightOnlyShape, rows: int, sms: int) -> Iterator[PersistentTile]:
    """Tiles of the persistent kernel: without splits, with the most that are possible, and the predicted fastest."""
    for tile_rows, columns in PERSISTENT_SIZES.get(rows, PERSISTENT_SIZES[max(PERSISTENT_SIZES)]):
        tile = PersistentTile(rows=tile_rows, columns=columns)
        yield tile
        split = [
            one
            for one in (evolve(tile, splits=splits) for splits in PERSISTENT_SPLITS)
            if rows <= MAX_SPLIT_ROWS and one.can_split(shape.weight_rows, shape.blocks, rows, sms)
        ]
        yield from split[-1:]
    default = PersistentTile(columns=256)
    predicted = tile_for_rows(default, shape.weight_rows, shape.blocks, rows, sms)
    if predicted != default:
        yield predicted


def _tensor_core_candidates(shape: WeightOnlyShape, rows: int, sms: int, shared: int) -> list[WeightOnlyTile | None]:
    """As `candidates`, among the tiles of the tensor-core kernel."""
    default = tensor_core_tile(shape, rows, sms, shared)
    if default is None:  # no tile fits
        return [None]
    wanted = [
        WeightOnlyTile(rows=tile_rows, columns=default.columns, warps=warps, stages=stages)
        for tile_rows, warps, stages in SHAPES.get(default.columns, ())
    ]
    for tile_rows, columns, warps, stages, row_words in SHAPES_SCALED_WEIGHTS.get(rows, ()):
        step = row_words * shape.layout.block // shape.layout.span
        wanted.append(
            WeightOnlyTile(rows=tile_rows, columns=columns, warps=warps, stages=stages, scales_weights=True, step=step)
        )
    fitting = (for_layout(tile, shape.layout) for tile in wanted)
    found = [
        default,
        *(with_splits(tile, shape, rows, sms) for tile in fitting if tile.shared_memory(shape.layout) <= shared),
    ]
    if rows >= MIN_ROWS_DOUBLED:
        found += [
            twice for tile in found for twice in other_splits(tile, shape, rows) if twice.splits == tile.splits * 2
        ]
    for tile_rows, columns, warps, stages in NARROW_SHAPES:
        tile = for_layout(WeightOnlyTile(rows=tile_rows, columns=columns, warps=warps, stages=stages), shape.layout)
        few = columns < rows and tile.programs(shape, rows) <= MAX_NARROW_PROGRAMS_PER_SM * sms
        if few and tile.shared_memory(shape.layout) <= shared:
            found.append(with_splits(tile, shape, rows, sms))
    return list(dict.fromkeys(found))


def prefetching(tile: WeightOnlyTile, shape: WeightOnlyShape) -> list[WeightOnlyTile]:
    """The same tile with prefetching, for small weights; empty for large ones."""
    is_tried = shape.weight_bytes < SMALL_WEIGHTS and not tile.ahead
    return [evolve(tile, ahead=TRIED_AHEAD[shape.layout.bits])] if is_tried else []


def even_splits(tile: WeightOnlyTile, shape: WeightOnlyShape, rows: int, sms: int) -> list[WeightOnlyTile]:
    """The same tile with splits for at most EVEN_PROGRAMS_PER_SM programs per multiprocessor."""
    if rows > EVEN_SPLITS_MAX_ROWS:
        return []
    return [with_even_splits(tile, shape, rows, number * sms) for number in EVEN_PROGRAMS_PER_SM]


def other_splits(tile: WeightOnlyTile, shape: WeightOnlyShape, rows: int) -> list[WeightOnlyTile]:
    """The same tile with a quarter, half, twice and four times as many splits, where the inputs can be split so."""
    programs = tile.programs(shape, rows)
    max_splits = min(MAX_SPLITS, shape.blocks // 2)
    numbers = [tile.splits // 4, tile.splits // 2, tile.splits * 2, tile.splits * 4]
    return [
        evolve(tile, splits=splits)
        for splits in numbers
        if splits == 1 or (1 < splits <= max_splits and fits_workspace(tile, programs, splits))
    ]
