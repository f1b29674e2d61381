"""The largest quantized value of each dtype."""

from __future__ import annotations

import torch

from engine.core.quant import FLOAT8, FLOAT8_MAX
from engine.ops.common.limits import max_quantized


def test_max_quantized_is_the_largest_finite_value() -> None:
    assert max_quantized(torch.int8) == 127
    assert max_quantized(getattr(torch, FLOAT8)) == FLOAT8_MAX
