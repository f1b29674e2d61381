"""What a quantization_config says of the KV cache, and which methods know of it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.fp8 import Fp8
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.int8 import Int8
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme
from engine.plugins.quant.none import Unquantized

from .w8_packers import compressed, number

CPU = DeviceInfo(type="cpu")
FLOAT8 = "float8_e4m3fn"
SCHEME = number("float", "tensor", observer="minmax", group_size=None)
ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": SCHEME}
PACKED = compressed("pack-quantized", {**number("int", "group"), "num_bits": 4, "group_size": 32}, None)


@pytest.mark.parametrize(
    ("config", "dtype", "has_scales"),
    [
        (None, None, False),
        ({"quant_method": "awq"}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, FLOAT8, True),
        ({"quant_method": "fp8"}, None, True),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, FLOAT8, True),
    ],
)
def test_kv_cache_scheme_is_parsed(config: Any, dtype: Any, has_scales: bool, caplog: pytest.LogCaptureFixture) -> None:
    scheme = KVCacheScheme.parse(config)
    assert (scheme.dtype, scheme.has_scales, bool(scheme.ignored())) == (dtype, has_scales, has_scales)
    assert (scheme.names("a") is not None) == has_scales
    scheme.warn_unsupported()
    assert not caplog.records


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (number("int", "tensor"), "int8 per tensor"),
        (number("float", "attn_head"), "fp8 per attn_head"),
        (number("float", "tensor", dynamic=True), "fp8 per tensor, dynamic"),
        (number("float", "tensor") | {"symmetric": False}, "asymmetric"),
        (number("float", "tensor") | {"num_bits": 4}, "fp4 per tensor"),
        ("dynamic", "'dynamic'"),
    ],
)
def test_unsupported_kv_cache_scheme_is_logged(stored: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    scheme = KVCacheScheme.parse({"quant_method": "compressed-tensors", "kv_cache_scheme": stored})
    assert (scheme.dtype, scheme.names("a")) == (None, None)
    assert "*.k_scale" in scheme.ignored()
    scheme.warn_unsupported()
    assert said in caplog.text
    assert "not supported" in caplog.text


def test_scales_have_newer_and_older_names() -> None:
    names = KVCacheScheme(has_scales=True).names("model.layers.3.self_attn")
    assert names is not None
    assert names.keys[:2] == ("model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.k_proj.output_scale")
    assert names.values[:2] == ("model.layers.3.self_attn.v_scale", "model.layers.3.self_attn.v_proj.output_scale")
    assert len(set(names.keys) & set(names.values)) == 1  # older files have one scale for both
    assert names.keys[-1] == names.values[-1]


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Fp8, compressed("float-quantized", number("float", "channel"), None, kv_cache_scheme=SCHEME)),
        (Fp8, {"quant_method": "fp8", "kv_cache_scheme": "static"}),
        (Int8, compressed("int-quantized", number("int", "channel"), None, kv_cache_scheme=SCHEME)),
        (CompressedTensors, PACKED | {"kv_cache_scheme": SCHEME}),
        (Unquantized, ALONE),
    ],
)
def test_methods_that_read_the_scales(method: Any, config: Any) -> None:
    assert method.refuses(config, CPU) is None
    assert method.kv_dtype(config) == FLOAT8
    layers = LayerFactory(dtype="float32", device="cpu", quant=method.from_checkpoint(config, None))
    layers.attention(0, 2, 1, 8, None, "a.self_attn")
    [reader] = layers.kv_scales
    assert {"a.self_attn.k_scale", "a.self_attn.v_scale"} <= set(reader.tensors())
    assert "*.q_scale" in layers.ignored


def test_methods_without_a_kv_cache_scheme_read_no_kv_scales() -> None:
    for method, config in ((Unquantized, None), (Gptq, {"quant_method": "gptq", "bits": 4}), (Fp8, None)):
        assert method.kv_dtype(config) is None
        layers = LayerFactory(dtype="float32", device="cpu", quant=method.from_checkpoint(config, None))
        layers.attention(0, 2, 1, 8, None, "a.self_attn")
        assert layers.kv_scales == []


def test_none_reads_a_checkpoint_that_quantizes_only_the_kv_cache() -> None:
    for method in (Fp8, Int8, CompressedTensors):
        assert "config_groups" in (method.refuses(ALONE, CPU) or "")
    assert Unquantized.refuses({**ALONE, "kv_cache_scheme": None}, CPU)
    with pytest.raises(CheckpointError, match="quantization_config"):
        Unquantized.from_checkpoint({**ALONE, "quant_method": "other"}, None)
