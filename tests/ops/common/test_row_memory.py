"""Memory of activations with room for whole tiles of rows."""

from __future__ import annotations

import pytest
import torch

from engine.ops.common import row_memory
from engine.ops.common.row_memory import empty_with_room
from engine.ops.gemm.tile_order import loaded_shape


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_there_is_no_room_after_few_rows_or_on_a_cpu() -> None:
    for like, rows in ((torch.zeros(1), 300), (torch.zeros(1).as_subclass(OnGpu), row_memory.MIN_ROWS - 1)):
        found = empty_with_room(like, (rows, 64))
        assert found.shape == (rows, 64)
        assert found.untyped_storage().nbytes() == rows * 64 * 4


@pytest.mark.parametrize(("shape", "rows"), [((17, 64), 256), ((256, 64), 256), ((3, 100, 64), 512), ((0, 64), 0)])
def test_whole_tiles_are_loaded_from_the_room(shape: tuple[int, ...], rows: int) -> None:
    found = empty_with_room(torch.zeros(1, dtype=torch.bfloat16).as_subclass(OnGpu), shape)
    assert found.shape == shape
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == rows * 64 * 2
    if rows:
        assert loaded_shape(found.view(-1, 64), 256) == ([rows, 64], [64, 1])
