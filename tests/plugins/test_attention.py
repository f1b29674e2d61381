"""The built-in attention backends under the conformance suite, and what each refuses."""

from __future__ import annotations

import attrs
import pytest
import torch

from engine.core.attention import AttentionSpec
from engine.core.device import DeviceInfo
from engine.plugins.attention import native
from engine.plugins.attention.native import NativeAttention
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.attention.triton import TritonAttention
from engine.plugins.kernels import interpreted
from engine.testing.attention import AttentionConformance

CPU = DeviceInfo(type="cpu")
GPU = DeviceInfo(type="cuda", capability=(9, 0))
SPEC = AttentionSpec(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    scale=0.5,
    dtype="float32",
    kv_dtype="float32",
    page_size=16,
    max_len=64,
    sliding_windows=(None,),
)


class TestTorch(AttentionConformance):
    backend = TorchAttention


class TestTorchHalf(AttentionConformance):
    backend = TorchAttention
    dtype = "bfloat16"


class TestNative(AttentionConformance):
    backend = NativeAttention


class TestNativeManyThreads(AttentionConformance):
    backend = NativeAttention

    @pytest.fixture(autouse=True)
    def _threads(self):
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


@pytest.mark.skipif(not interpreted(), reason="runs on the GPU")
class TestTriton(AttentionConformance):
    backend = TritonAttention


@pytest.mark.gpu
class TestTorchOnGpu(AttentionConformance):
    backend = TorchAttention
    device = "cuda"


@pytest.mark.parametrize(
    ("backend", "changes", "device", "said"),
    [
        (TorchAttention, {"kv_dtype": "bfloat16"}, CPU, "--kv-dtype auto"),
        (NativeAttention, {}, GPU, "--device cpu"),
        (NativeAttention, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}, CPU, "--dtype float32"),
    ],
)
def test_refusals_say_what_would_work(backend, changes, device, said):
    assert backend.refuses(SPEC, CPU) is None
    assert said in backend.refuses(attrs.evolve(SPEC, **changes), device)


def test_without_its_native_part_it_refuses(monkeypatch):
    monkeypatch.setattr(native, "native_kernel", lambda: None)
    assert "C compiler" in NativeAttention.refuses(SPEC, CPU)
