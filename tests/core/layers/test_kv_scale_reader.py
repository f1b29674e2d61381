"""KV scales, from the checkpoint to the KV pool."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import torch

from engine.core.attention.base import AttentionSpec
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.layers.kv_scale_reader import KVScaleReader, find_kv_scales
from engine.core.quant.base import KVScaleNames, QuantMethod
from engine.core.quant.float8 import UNSCALED, KVScales

NAMES = KVScaleNames(keys=("a.k", "a.k2", "a.both"), values=("a.v", "a.v2", "a.both"))
SPEC = AttentionSpec(
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    scale=1.0,
    dtype="bfloat16",
    kv_dtype="float8_e4m3fn",
    block_size=16,
    max_len=64,
    sliding_windows=(None, None),
)


class Scaled(QuantMethod):
    api = "1"

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> Any:
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: Any) -> Any:
        return cls()

    def linear(self, spec: Any) -> Any:
        return None

    def kv_scales(self, attention: Any) -> Any:
        return KVScaleNames(keys=(f"{attention}.k",), values=(f"{attention}.v",)) if "1" in attention else None


def reader(layer: int = 0, **scales: float) -> KVScaleReader:
    made = KVScaleReader(layer, NAMES)
    made.fill({f"a.{name}": torch.tensor([scale]) for name, scale in scales.items()})
    return made


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k": 0.5, "v": 0.25}, KVScales(key=0.5, value=0.25)),
        ({"k2": 0.5, "v": 0.25}, KVScales(key=0.5, value=0.25)),
        ({"k": 0.5, "k2": 4.0, "v": 0.25}, KVScales(key=0.5, value=0.25)),
        ({"both": 0.5}, KVScales(key=0.5, value=0.5)),
        ({}, None),
    ],
)
def test_the_first_name_in_the_checkpoint_is_read(scales: Any, expected: Any) -> None:
    assert reader(**scales).scales == expected


def test_scales_are_optional_and_not_sharded() -> None:
    specs = KVScaleReader(0, NAMES).tensors()
    assert set(specs) == {*NAMES.keys, *NAMES.values}
    assert all(spec.optional and spec.shape == (1,) and spec.shard_dim is None for spec in specs.values())
    assert reader(k=1.0, v=1.0).nbytes == 0


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k": 0.5}, "scales only one of keys and values: it lacks a.v or a.v2"),
        ({"v": 0.5}, "it lacks a.k or a.k2"),
        ({"k": 0.0, "v": 1.0}, "tensor a.k is 0.0; a scale is a positive number"),
        ({"k": 1.0, "v": float("nan")}, "tensor a.v is nan"),
        ({"k": float("inf"), "v": 1.0}, "tensor a.k is inf"),
        ({"k": 1.0, "v": -1.0}, "tensor a.v is -1.0"),
    ],
)
def test_invalid_scales_are_an_error(scales: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reader(**scales)


def test_factory_asks_the_method_by_the_name_in_the_checkpoint() -> None:
    layers = LayerFactory(dtype="float32", device="cpu", quant=Scaled())
    for index in range(3):
        layers.attention(index, 2, 1, 8, None, f"layers.{index}")
    layers.attention(3, 2, 1, 8)
    [made] = layers.kv_scales
    assert made.layer == 1
    assert layers.layers == [made]
    assert set(made.tensors()) == {"layers.1.k", "layers.1.v"}


def test_no_warning_if_no_scale_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    found = find_kv_scales(SPEC, [reader(1, k=3.0, v=4.0), reader(0, k=1.0, v=2.0)])
    assert found == (KVScales(key=1.0, value=2.0), KVScales(key=3.0, value=4.0))
    assert not caplog.records


@pytest.mark.parametrize(("readers", "missing"), [([], 2), ([reader(0), reader(1, k=3.0, v=4.0)], 1)])
def test_layers_without_scales_are_warned_about_once(
    readers: Any, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_kv_scales(SPEC, readers)
    assert found.count(UNSCALED) == missing
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"no scales for the keys and values of {missing} of 2 layers" in record.message
    assert "values beyond 448 are clipped" in record.message
    assert "--kv-dtype bfloat16" in record.message


def test_unused_scales_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = attrs.evolve(SPEC, kv_dtype="bfloat16")
    assert find_kv_scales(spec, [reader(0, k=1.0, v=2.0), reader(1, k=1.0, v=2.0)]) == ()
    [record] = caplog.records
    assert "the KV cache is in bfloat16; --kv-dtype float8_e4m3fn would use them" in record.message
    caplog.clear()
    assert find_kv_scales(spec, []) == ()
    assert not caplog.records
