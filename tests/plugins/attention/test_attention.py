"""The built-in attention backends under the conformance suite, and what each refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
import triton

from engine.core.attention.base import AttentionSpec
from engine.core.device import DeviceInfo
from engine.core.types import SamplingParams
from engine.plugins.attention import native
from engine.plugins.attention.flashinfer import FlashInferAttention
from engine.plugins.attention.flashinfer_rules import FlashInferOptions
from engine.plugins.attention.native import NativeAttention
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.attention.triton import TritonAttention
from engine.testing.attention import AttentionConformance

CPU = DeviceInfo(type="cpu")
GPU = DeviceInfo(type="cuda", capability=(9, 0))
SPEC = AttentionSpec(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
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
    def _threads(self) -> Iterator[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


class InterpretedTriton(TritonAttention):
    """On a CPU, where Triton's interpreter runs the kernels: for tests, and too slow for anything else."""

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return super().refuses(spec, attrs.evolve(device, type="cuda"))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="its kernels are compiled for the GPU")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for rows of padding: NaN is there
class TestTriton(AttentionConformance):
    backend = InterpretedTriton
    longest = 200


@pytest.mark.gpu
class TestTorchOnGpu(AttentionConformance):
    backend = TorchAttention
    device = "cuda"


@pytest.mark.gpu
class TestTritonOnGpu(AttentionConformance):
    backend = TritonAttention
    device = "cuda"
    dtype = "bfloat16"


@pytest.mark.gpu
class TestFlashInferOnGpu(AttentionConformance):
    backend = FlashInferAttention
    device = "cuda"
    dtype = "bfloat16"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_triton_computes_in_16_bit_types_on_a_gpu(dtype: str) -> None:
    suite = TestTritonOnGpu()
    suite.dtype = dtype
    suite.test_batch("mixed", (4, 2))
    suite.test_one_plan_for_changing_buffers(20)
    suite.test_context(1023)


@pytest.mark.gpu
class TestFlashInferWithoutXqaOnGpu(AttentionConformance):
    backend = FlashInferAttention
    device = "cuda"
    dtype = "bfloat16"
    options = FlashInferOptions(prefill="fa2", decode="wrapper")


@pytest.mark.parametrize(
    ("backend", "changes", "device", "said"),
    [
        (TorchAttention, {"kv_dtype": "bfloat16"}, CPU, "--kv-dtype auto or float8_e4m3fn"),
        (NativeAttention, {"kv_dtype": "float8_e4m3fn"}, CPU, "--kv-dtype float32 or --attention torch"),
        (NativeAttention, {}, GPU, "--device cpu"),
        (TritonAttention, {}, CPU, "--device cuda"),
        (TritonAttention, {"head_dim": 72}, GPU, "multiple of 16"),
        (TritonAttention, {"head_dim": 512}, GPU, "up to 256"),
        (TritonAttention, {"kv_dtype": "bfloat16"}, GPU, "--kv-dtype auto"),
        (TritonAttention, {"kv_dtype": "float8_e4m3fn"}, attrs.evolve(GPU, capability=(8, 6)), "--kv-dtype auto"),
        (TritonAttention, {}, attrs.evolve(GPU, capability=(7, 5)), "another backend"),
        (NativeAttention, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}, CPU, "--dtype float32"),
    ],
)
def test_refusals_say_what_would_work(backend: Any, changes: Any, device: Any, said: str) -> None:
    assert backend.refuses(SPEC, GPU if backend is TritonAttention else CPU) is None
    assert said in backend.refuses(attrs.evolve(SPEC, **changes), device)


def test_backends_declare_whether_they_read_a_float8_cache() -> None:
    reading = {
        cls for cls in (TorchAttention, NativeAttention, TritonAttention, FlashInferAttention) if cls.reads_float8
    }
    assert reading == {TorchAttention, TritonAttention, FlashInferAttention}
    spec = attrs.evolve(SPEC, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert TorchAttention.refuses(spec, CPU) is None
    assert TritonAttention.refuses(spec, attrs.evolve(GPU, capability=(8, 9))) is None


def test_engine_with_two_backends_generates_the_same_tokens(make_engine: Any) -> None:
    prompts = [[1, 2, 3], list(range(4, 40)), [5]]
    settings = {"scheduler__max_batch_tokens": 16}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone, pair = (make_engine(attention=name, **settings) for name in ("torch", "torch,native"))
    expected = [one.token_ids for one in alone.generate(prompts, params)]
    assert [one.token_ids for one in pair.generate(prompts, params)] == expected
    assert "torch,native" in [choice.name for choice in pair.parts.choices]


def test_native_refuses_without_its_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native_kernel", lambda: None)
    assert "C compiler" in NativeAttention.refuses(SPEC, CPU)


def test_triton_refuses_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in TritonAttention.refuses(SPEC, GPU)
