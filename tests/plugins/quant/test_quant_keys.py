"""What methods do with the keys of a quantization_config, and with files that describe the quantization instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.device import DeviceInfo
from engine.core.weights import Checkpoint
from engine.plugins.quant.auto_round import AutoRound
from engine.plugins.quant.awq import Awq
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.fp8 import Fp8
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.none import Unquantized

from .w8_packers import compressed

CPU = DeviceInfo(type="cpu")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        (Fp8, FP8 | {"modules_to_convert": ["model.embed_tokens"]}, ["modules_to_convert", "embed_tokens"]),
        (Fp8, FP8 | {"expert_dtype": "fp4"}, ["expert_dtype is 'fp4'"]),
        (Fp8, FP8 | {"scale_fmt": "e5m3"}, ["scale_fmt is 'e5m3'", "float or ue8m0"]),
        (Fp8, FBGEMM | {"activation_scale_ub": 0}, ["activation_scale_ub is 0", "positive"]),
        (Gptq, GPTQ | {"pack_dtype": "int16"}, ["pack_dtype is 'int16'"]),
        (Gptq, GPTQ | {"rotation": "hadamard"}, ["rotation is 'hadamard'"]),
        (Gptq, GPTQ | {"modules_in_block_to_quantize": "mlp"}, ["modules_in_block_to_quantize is 'mlp'"]),
        (AutoRound, AUTO_ROUND | {"act_bits": 8}, ["act_bits is 8"]),
        (AutoRound, AUTO_ROUND | {"data_type": "mx_fp"}, ["data_type is 'mx_fp'"]),
        (AutoRound, AUTO_ROUND | {"bits": 3}, ["3 bits", "export again with auto-round"]),
        (AutoRound, AUTO_ROUND | {"bits": 8, "packing_format": "auto_round:auto_awq"}, ["8 bits", "with 4"]),
        (AutoRound, AUTO_ROUND | {"packing_format": "auto_round:fp8_static"}, ["auto_round:fp8_static"]),
        (AutoRound, AUTO_ROUND | {"extra_config": {"a": {"bits": 2}}}, ["extra_config a", "2 bits"]),
        (AutoRound, GPTQ, ["'gptq'", "auto-round only"]),
        (
            CompressedTensors,
            compressed("nvfp4-pack-quantized", PACKED | {"type": "float"}, None),
            ["leave --quant out"],
        ),
        (
            Fp8,
            compressed("nvfp4-pack-quantized", PACKED | {"type": "float"}, None),
            ["4 bits", "quantize again with llm-compressor"],
        ),
        (Unquantized, {"quant_method": "bitsandbytes"}, ["bitsandbytes", "quantize it with llm-compressor"]),
        (Unquantized, {"quant_method": "quark"}, ["quark", "export again with Quark"]),
    ],
)
def test_values_that_change_results_are_refused_by_name(method: Any, config: Any, words: Any) -> None:
    refusal = method.refuses(config, CPU)
    assert refusal is not None
    for word in words:
        assert word in refusal


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Fp8, FP8),
        (Fp8, FBGEMM),
        (Gptq, GPTQ),
        (Awq, {"quant_method": "awq"}),
        (AutoRound, AUTO_ROUND),
        (CompressedTensors, compressed("pack-quantized", PACKED, None)),
    ],
)
def test_unknown_keys_are_named_in_a_warning(method: Any, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    method.from_checkpoint(config, None)
    assert not caplog.records
    method.from_checkpoint(config | {"swirl": 3}, None)
    [record] = caplog.records
    assert "swirl" in record.message


@pytest.mark.parametrize(
    ("method", "file", "content"),
    [
        (Gptq, "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        (Awq, "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_older_files_describe_the_quantization(method: Any, file: str, content: Any, tmp_path: Path) -> None:
    """Only where config.json says nothing: what it says takes precedence."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))
    found = Checkpoint.open(tmp_path).quantization
    assert method.refuses(found, CPU) is None
    assert Unquantized.refuses(found, CPU)
    assert Fp8.refuses(found, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    found = Checkpoint.open(tmp_path).quantization
    assert method.refuses(found, CPU)
    assert Fp8.refuses(found, CPU) is None


def test_keys_of_float8_checkpoints_set_activations_scales_and_clamping() -> None:
    """dequantize leaves activations alone; ue8m0 makes scales powers of two; the bound of FBGEMM clamps."""
    blocks = FP8 | {"weight_block_size": [128, 128]}
    forms = [
        Fp8.read(config).format("a")
        for config in (blocks, blocks | {"dequantize": True}, blocks | {"scale_fmt": "ue8m0"}, FBGEMM)
    ]
    assert all(form is not None for form in forms)
    assert [form and form.activations for form in forms] == ["token", "none", "token", "token"]
    assert [form and form.powers_of_two for form in forms] == [False, False, True, False]
    assert [form and form.max_activation for form in forms] == [None, None, None, 1200.0]
    assert forms[3] is not None
    assert forms[3].granularity == "channel"


def test_modules_in_block_to_quantize_are_the_only_ones() -> None:
    quant = Gptq(GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]})
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    found = [quant.config_of(f"model.layers.0.{name}") is not None for name in names]
    assert found == [True, False, True, False]


def test_auto_round_settings_follow_names_patterns_and_blocks() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 8},
        ".*self_attn\\.o_proj.*": {"bits": 16},
        "lm_head": {"bits": 8, "group_size": 64},
    }
    quant = AutoRound(AUTO_ROUND | {"block_name_to_quantize": "model.layers,other.layers", "extra_config": extra})
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj",
             "lm_head", "visual.blocks.0.proj", "other.layers.3.proj"]  # fmt: skip
    found = [
        settings and (settings.bits, settings.group_size) for name in names for settings in [quant.settings_of(name)]
    ]
    assert found == [(8, 32), (4, 32), None, (8, 64), None, (4, 32)]
