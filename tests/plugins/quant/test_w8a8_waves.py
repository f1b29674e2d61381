"""The choice of a W8A8 tile by the waves of its programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import evolve

from engine.ops.gemm.scaled_matmul import GATED_TILE
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant import w8a8_matmul
from engine.plugins.quant.w8a8_matmul import W8A8Matmul
from engine.plugins.quant.w8a8_tiles import ROW_CLASSES
from engine.plugins.quant.w8a8_waves import SQUARE_TILE, tile_by_waves

SMS = 132


@pytest.mark.parametrize(
    ("outputs", "square", "large"),
    [
        (4096, (1152, 1216, 1536, 2176, 2560, 3200), (640, 1024, 1664, 2048, 3072, 4096, 8192)),
        (6144, (768, 1024, 1536, 2432), (640, 1152, 1408, 1920, 2560, 4096)),
        (2560, (640, 2240), (1024, 1536, 3072)),
    ],
)
def test_square_tiles_are_chosen_where_large_ones_leave_the_last_wave_almost_empty(
    outputs: int, square: Sequence[int], large: Sequence[int]
) -> None:
    assert {tile_by_waves(GATED_TILE, rows, outputs, SMS) for rows in square} == {SQUARE_TILE}
    assert {tile_by_waves(GATED_TILE, rows, outputs, SMS) for rows in large} == {GATED_TILE}


def test_other_tiles_are_kept() -> None:
    for tile in (
        evolve(GATED_TILE, persistent=False),
        evolve(GATED_TILE, rows=64),
        evolve(GATED_TILE, rows=64, outputs=128, splits=2),
        SQUARE_TILE,
    ):
        assert tile_by_waves(tile, 1152, 4096, SMS) == tile


def test_only_the_last_row_class_is_subject_to_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_matmul, "num_sms", lambda device: SMS)
    codes = W8A8Matmul(Workspace(torch.device("cpu")), torch.int8, 2560, 4096, torch.bfloat16)
    for rows in ROW_CLASSES:
        codes.choose(rows, GATED_TILE)
    assert codes.tile(512) == GATED_TILE
    assert codes.tile(640) == SQUARE_TILE
    codes.choose(ROW_CLASSES[-1], None)
    assert codes.tile(640) is None
