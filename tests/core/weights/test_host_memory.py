from __future__ import annotations

import resource

import pytest
import torch

from engine.core.weights.host_memory import host_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 7, 2)])
def test_shape_type_and_alignment(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = host_tensor(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert tensor.nbytes == torch.empty(shape, dtype=dtype).nbytes


def test_zeroed_memory_takes_no_space_before_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensor = host_tensor((2**30,), torch.bfloat16, zeroed=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
    assert not tensor[:: 2**27].any()
