"""The choice of a W8A8 tile by the waves of its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.ops.gemm.scaled_matmul import GATED_TILE, W8A8Tile
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant import w8a8_shape
from engine.plugins.quant.w8a8_matmul import W8A8Matmul
from engine.plugins.quant.w8a8_tiles import PERSISTENT_SHAPES, ROW_CLASSES
from engine.plugins.quant.w8a8_waves import LARGE_TILE, SIZES, SQUARE_TILE, TIMES, predicted_time, tile_by_waves

SMS = 132
TALL = SIZES[64, 256]


def by_waves(chosen: W8A8Tile | None, rows: int, outputs: int, inputs: int, measured: Sequence[Any] = ()) -> Any:
    row_class = next((size for size in ROW_CLASSES if size >= rows), ROW_CLASSES[-1])
    return tile_by_waves(chosen, rows, row_class, outputs, inputs, SMS, measured)


@pytest.mark.parametrize(
    ("outputs", "square", "large"),
    [
        (4096, (1152, 1216, 1536, 2176, 2560, 3200), (896, 1024, 1664, 2048, 3072, 4096, 8192)),
        (6144, (768, 1024, 2432), (640, 1152, 1408, 1920, 2560, 4096)),
        (2560, (640, 2240), (1024, 1536, 3072)),
    ],
)
def test_square_tiles_are_chosen_where_large_ones_leave_the_last_wave_almost_empty(
    outputs: int, square: Sequence[int], large: Sequence[int]
) -> None:
    assert {by_waves(GATED_TILE, rows, outputs, 8192) for rows in square} == {SQUARE_TILE}
    assert {by_waves(GATED_TILE, rows, outputs, 8192) for rows in large} == {GATED_TILE}


def test_tiles_of_64_rows_are_chosen_for_rows_and_outputs_that_fill_one_wave_of_them() -> None:
    assert by_waves(GATED_TILE, 300, 6144, 4096) == TALL
    assert by_waves(None, 300, 6144, 4096) == TALL
    assert by_waves(SQUARE_TILE, 288, 1024, 3072) == SIZES[64, 64]
    assert by_waves(GATED_TILE, 384, 6144, 6144) == GATED_TILE  # 144 programs of TALL


def test_the_library_is_kept_where_products_have_many_waves() -> None:
    assert by_waves(None, 1043, 3840, 2304) == TALL
    assert by_waves(None, 8192, 4096, 4096) is None
    assert by_waves(None, 1043, 28672, 4096) is None


def test_what_was_measured_with_as_many_programs_is_not_predicted() -> None:
    chosen = SIZES[128, 64]
    assert by_waves(chosen, 512, 4096, 4096) == SQUARE_TILE
    assert by_waves(chosen, 512, 4096, 4096, [SQUARE_TILE, TALL]) == chosen
    assert by_waves(chosen, 500, 4096, 4096, [SQUARE_TILE, TALL]) == chosen  # as many programs as for 512 rows
    assert by_waves(chosen, 320, 4096, 4096, [SQUARE_TILE, TALL]) in (SQUARE_TILE, TALL)


def test_a_tile_with_splits_is_kept_and_others_count_like_the_persistent_one() -> None:
    split = evolve(GATED_TILE, rows=64, outputs=128, splits=2)
    assert by_waves(split, 1152, 4096, 4096) == split
    unknown = evolve(GATED_TILE, rows=32)
    assert by_waves(unknown, 1152, 4096, 4096) == unknown
    assert by_waves(evolve(GATED_TILE, persistent=False), 1152, 4096, 4096) == SQUARE_TILE


def test_the_tiles_of_the_rule_are_candidates_elsewhere() -> None:
    sizes = {size for sizes in PERSISTENT_SHAPES.values() for size in sizes}
    known = {(tile.rows, tile.outputs, tile.warps, tile.stages, tile.block_k) for tile in TIMES}
    assert known - sizes == {(64, 256, 4, 5, 128)}
    assert LARGE_TILE == GATED_TILE


def test_the_time_grows_with_rows_and_inputs() -> None:
    for tile in TIMES:
        times = [predicted_time(tile, rows, 4096, 4096, SMS) for rows in range(64, 4096, 64)]
        assert times == sorted(times)
        assert predicted_time(tile, 1024, 4096, 4096, SMS) < predicted_time(tile, 1024, 4096, 8192, SMS)


def test_only_row_classes_of_more_than_256_rows_are_subject_to_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: SMS)
    monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device: True)
    codes = W8A8Matmul(Workspace(torch.device("cpu")), torch.int8, 6144, 4096, torch.bfloat16)
    assert codes.tile(300) == codes.shape.default_tile(300)
    for rows in codes.row_classes:
        codes.choose(rows, GATED_TILE)
    assert codes.tile(250) == GATED_TILE
    assert codes.tile(300) == TALL
    assert codes.tile(512) == GATED_TILE
    assert codes.tile(768) == SQUARE_TILE
    codes.choose(ROW_CLASSES[-1], None)
    assert codes.tile(8192) is None


def test_layers_of_one_shape_compute_the_tile_of_a_number_of_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_shape, "num_sms", lambda device: SMS)
    monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device: True)
    computed: list[int] = []
    by_waves = w8a8_shape.tile_by_waves

    def noted(chosen: Any, rows: int, *given: Any) -> Any:
        computed.append(rows)
        return by_waves(chosen, rows, *given)

    monkeypatch.setattr(w8a8_shape, "tile_by_waves", noted)
    w8a8_shape.tile_for_rows.cache_clear()
    first, second = (
        W8A8Matmul(Workspace(torch.device("cpu")), torch.int8, 6144, 4096, torch.bfloat16) for _ in range(2)
    )
    for layer in (first, second):
        for rows in layer.row_classes:
            layer.choose(rows, GATED_TILE)
    assert [layer.tile(rows) for layer in (first, second) for rows in (300, 768)] == [TALL, SQUARE_TILE] * 2
    assert computed == [300, 768]
    second.choose(512, SQUARE_TILE)
    assert second.tile(300) == TALL
    assert first.tile(300) == TALL
    assert computed == [300, 768, 300]
