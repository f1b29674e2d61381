"""The quantization suite finds faulty methods, and passes correct ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import CheckpointError
from engine.core.quant.base import QuantMethod
from engine.testing.quant import QuantConformance
from tests.testing.quant_faults import (
    FAULTS,
    ByRow,
    Gating,
    Halved,
    Kernel,
    OneScale,
    Preparing,
    method_of,
    named,
    preparing,
)


class TestHalved(Halved):
    pass


class TestHalvedInHalf(Halved):
    dtype = "bfloat16"


class TestFusedInputQuantization(Halved):
    method = method_of(Preparing)


class TestInputQuantizationByRow(Halved):
    method = method_of(preparing(ByRow))


class TestGating(Halved):
    method = method_of(Gating)


@pytest.mark.parametrize(
    ("method", "test", "arguments", "message"),
    FAULTS,
    ids=[f"{fault[0].kernel.__name__}-{fault[1]}" for fault in FAULTS],
)
def test_suite_finds_faults(
    method: type[QuantMethod[Any]], test: str, arguments: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    suite = type("Suite", (Halved,), {"method": method})()
    needs = () if test in ("test_refusals", "test_kv_cache_dtype_and_scales") else (tmp_path,)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        getattr(suite, test)(*needs, *arguments)


def test_suite_skips_refused_sharding_with_the_refusal(tmp_path: Path) -> None:
    def linear(self, spec: Any) -> Any:
        if spec.ranks > 2:
            raise CheckpointError("4 ranks would cut blocks of 32")
        return Kernel(spec)

    suite = type("Suite", (Halved,), {"method": named(linear=linear)})()
    with pytest.raises(pytest.skip.Exception, match="cut blocks of 32"):
        suite.test_row_parallel(tmp_path)


def test_suite_accepts_a_method_that_quantizes_nothing(tmp_path: Path) -> None:
    method = named(linear=lambda self, spec: None, refuses=classmethod(lambda cls, checkpoint, device: None))
    suite = type("Suite", (QuantConformance,), {"method": method})()
    with pytest.raises(AssertionError, match="does not quantize a linear layer"):
        suite.test_layers_are_quantized(tmp_path)
    suite = type("Suite", (QuantConformance,), {"method": method, "quantizes": False})()
    suite.test_layers_are_quantized(tmp_path)
    suite.test_product(tmp_path, 17, True)


def test_suite_says_how_to_name_tensors_when_store_returns_whole_names(tmp_path: Path) -> None:
    def store(self: Any, name: str, weight: Any) -> Any:
        tensors, weight = Halved.store(self, name, weight)
        return {f"{name}.{end}": tensor for end, tensor in tensors.items()}, weight

    suite = type("Suite", (Halved,), {"store": store})()
    with pytest.raises(AssertionError, match=r"tensor of layer 'a' 'a\.halves'; name it by what follows: 'halves'"):
        suite.test_product(tmp_path, 1, False)


def test_suite_allows_the_stated_error(tmp_path: Path) -> None:
    members = {"method": method_of(OneScale), "error": 0.02}
    suite = type("Suite", (Halved,), members)()
    suite.test_product(tmp_path, 17, True)
    with pytest.raises(AssertionError, match="part 2: relative error"):
        suite.test_merged_parts(tmp_path)


@pytest.mark.gpu
def test_suite_finds_a_replay_of_stale_input(tmp_path: Path) -> None:
    class Stale(Kernel):
        """Multiplies the x that it saw first of each size."""

        def apply(self, x: Any, weights: Any, bias: Any) -> Any:
            self.seen = getattr(self, "seen", {})
            return super().apply(self.seen.setdefault(len(x), x.clone()), weights, bias)

    suite = type("Suite", (Halved,), {"method": method_of(Stale), "device": "cuda:0"})()
    with pytest.raises(AssertionError, match="a replay of 1 rows: relative error"):
        suite.test_captured_calls(tmp_path)


@pytest.mark.gpu
class TestHalvedOnGpu(Halved):
    device = "cuda:0"
    dtype = "bfloat16"
