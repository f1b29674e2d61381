"""Which kernels a GPU gets, by its compute capability."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops.common import launch
from engine.plugins.quant import w8a8_matmul, w8a8_shape

GPU = torch.device("cuda", 15)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


CACHED = (
    launch.has_capability,
    launch.has_tma,
    launch.dependent_launch,
    launch.has_wgmma,
    w8a8_shape.has_block_scaled_mm,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes GPU one of this capability, or of ROCm."""

    def make(capability: tuple[int, int], *, hip: str | None = None, cuda: str | None = "12.9") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    for function in CACHED:
        function.cache_clear()
    yield make
    for function in CACHED:
        function.cache_clear()


def features(device: torch.device) -> Any:
    return {
        "tma": launch.has_tma(device),
        "pdl": launch.dependent_launch(device)["PDL"],
        "wgmma": launch.has_wgmma(device),
        "int8": w8a8_matmul.has_tensor_cores_for(device, INT8),
        "float8": w8a8_matmul.has_tensor_cores_for(device, FLOAT8),
        "block-scaled library": w8a8_shape.has_block_scaled_mm(device),
    }


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), set()),
        ((8, 0), {"int8"}),
        ((8, 9), {"int8", "float8"}),
        ((9, 0), {"tma", "pdl", "wgmma", "int8", "float8", "block-scaled library"}),
        ((10, 0), {"tma", "pdl", "int8", "float8"}),
        ((12, 0), {"tma", "pdl", "int8", "float8"}),
    ],
)
def test_features_follow_from_the_compute_capability(capability: Any, expected: Any, gpu: Any) -> None:
    gpu(capability)
    assert {name for name, has in features(GPU).items() if has} == expected


def test_a_rocm_gpu_has_no_feature_of_hopper(gpu: Any) -> None:
    """An MI300 calls itself 9.4."""
    gpu((9, 4), hip="6.4", cuda=None)
    assert not any(features(GPU).values())


def test_block_scaled_library_needs_a_new_cuda(gpu: Any) -> None:
    gpu((9, 0), cuda="12.8")
    assert not w8a8_shape.has_block_scaled_mm(GPU)


def test_kernels_of_many_rows_are_not_launched_early(gpu: Any) -> None:
    gpu((9, 0))
    assert launch.dependent_launch_of_rows(GPU, launch.MANY_ROWS) == {"PDL": True, "launch_pdl": True}
    assert launch.dependent_launch_of_rows(GPU, launch.MANY_ROWS + 1) == {"PDL": False}
    gpu((8, 0))
    launch.dependent_launch.cache_clear()
    launch.has_capability.cache_clear()
    assert launch.dependent_launch_of_rows(GPU, 1) == {"PDL": False}
