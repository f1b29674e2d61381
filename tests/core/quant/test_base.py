"""The parts of the contract of quantization methods that check what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.quant.base import TensorSpec


@pytest.mark.parametrize("dtypes", [(torch.float32,), ("float32", torch.bfloat16), "float32", (3,)])
def test_tensor_spec_refuses_types_that_are_not_names(dtypes: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtypes has the names of torch's types, as \('bfloat16', 'float32'\), not "):
        TensorSpec(shape=(2,), dtypes=dtypes)


def test_tensor_spec_takes_names_of_types() -> None:
    assert TensorSpec(shape=(2,), dtypes=("float32", "int8")).dtypes == ("float32", "int8")


@pytest.mark.parametrize(("shape", "dim"), [((4,), 1), ((4, 8), 2), ((4, 8), -1)])
def test_tensor_spec_refuses_a_shard_dim_that_the_shape_does_not_have(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(ValueError, match=rf"^shard_dim = {dim} is not a dimension, counted from 0, of the shape \("):
        TensorSpec(shape=shape, dtypes=("float32",), shard_dim=dim)
