"""What stands in for attention while piecewise graphs are captured."""

from __future__ import annotations

from typing import Any

import torch

from engine.core.runner.piecewise_graphs import _AttentionCall, _GraphBreak
from engine.ops.gemm.tile_order import loaded_shape


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_the_result_of_attention_has_room_for_whole_tiles_of_the_next_gemm() -> None:
    calls: list[_AttentionCall] = []
    breaks: list[int] = []
    stand_in = _GraphBreak(lambda: breaks.append(len(calls)), calls, 1, 64)
    q: Any = torch.zeros(300, 4, 128, dtype=torch.bfloat16).as_subclass(OnGpu)
    out = stand_in.forward(7, q, q, q, None)
    assert (out.shape, out.dtype) == ((300, 4, 64), torch.bfloat16)
    assert loaded_shape(out.view(300, 256), 256) == ([512, 256], [256, 1])
    assert breaks == [0]
    [call] = calls
    assert (call.group, call.layer, call.out.data_ptr()) == (1, 7, out.data_ptr())
