from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import CheckpointError
from engine.core.quant.base import LinearPart, LinearSpec
from engine.plugins.quant.quantization_config import (
    CompressedConfig,
    QuantArgs,
    is_listed,
    match_rank,
    same_for_all,
    unquantized_modules,
)

NAME = "model.layers.1.mlp.gate_proj"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(**groups: Any) -> Any:
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("targets", "rank"),
    [
        ([NAME], 0),
        (["re:.*gate_proj", NAME], 0),
        (["re:.*gate_proj"], 1),
        (["re:.*mlp"], 1),  # from the beginning, not to the end
        (["re:mlp.*"], None),
        (["Linear"], 2),
        (["re:.*gate_proj", "Linear"], 1),
        (["mlp.gate_proj"], None),
        ([], None),
    ],
)
def test_targets_match_by_name_pattern_or_class(targets: Any, rank: int | None) -> None:
    assert match_rank(NAME, targets) == rank


@pytest.mark.parametrize(
    ("entry", "listed"),
    [
        (NAME, True),
        ("gate_proj", True),
        ("mlp.gate_proj", True),
        ("model.layers.1", True),
        ("model.layers.11", False),
        ("layers.1", True),
        ("gate", False),
        ("lm_head", False),
        ("re:.*layers\\.1\\..*", True),
        ("re:.*layers\\.2\\..*", False),
    ],
)
def test_is_listed_matches_whole_components(entry: Any, listed: bool) -> None:
    assert is_listed(NAME, [entry]) is listed


def test_unquantized_modules_are_read_under_any_key() -> None:
    assert unquantized_modules({"modules_to_not_convert": None, "ignored_layers": ["a"], "ignore": ["b"]}) == ("a", "b")
    assert unquantized_modules({}) == ()
    with pytest.raises(CheckpointError, match="ignored_layers is 'lm_head'"):
        unquantized_modules({"ignored_layers": "lm_head"})


def test_broken_pattern_is_named() -> None:
    with pytest.raises(CheckpointError, match="no regular expression"):
        match_rank(NAME, ["re:*gate"])


def test_most_specific_scheme_wins_and_ignored_modules_have_none() -> None:
    config = CompressedConfig.parse(
        {
            **compressed(
                group_0={"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
                group_1={"targets": ["re:.*down_proj"], "weights": FP8},
                group_2={"targets": ["model.layers.0.mlp.down_proj"], "weights": FP8 | {"strategy": "tensor"}},
            ),
            "ignore": ["lm_head", "re:.*layers\\.3\\..*"],
        }
    )
    found = {
        name: scheme and (scheme.name, scheme.format)
        for name in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj",
                     "model.layers.3.mlp.down_proj", "lm_head")
        for scheme in [config.scheme(name)]
    }  # fmt: skip
    assert found == {
        "model.layers.1.mlp.up_proj": ("group_0", "pack-quantized"),
        "model.layers.1.mlp.down_proj": ("group_1", "float-quantized"),
        "model.layers.0.mlp.down_proj": ("group_2", "float-quantized"),
        "model.layers.3.mlp.down_proj": None,
        "lm_head": None,
    }


def test_module_that_no_scheme_names_is_not_quantized() -> None:
    config = CompressedConfig.parse(compressed(group_0={"targets": ["re:.*q_proj"], "weights": FP8}))
    assert config.scheme(NAME) is None


def test_arguments_are_read_with_the_defaults_of_the_format() -> None:
    assert QuantArgs.parse({}) == QuantArgs()
    assert QuantArgs.parse({"group_size": 64}).strategy == "group"
    per_channel = QuantArgs.parse({"group_size": -1})
    assert (per_channel.strategy, per_channel.group_size) == ("channel", None)
    block = QuantArgs.parse({"strategy": "block", "block_structure": [128, 64], "type": "float"})
    assert block.block == (128, 64)
    assert QuantArgs.parse({"strategy": "block", "block_structure": "128x64"}).block == (128, 64)
    orders = [QuantArgs.parse({"actorder": one}).actorder for one in (None, False, True, "dynamic", "static", "weight")]
    assert orders == [None, None, "group", "group", "weight", "weight"]
    assert str(block) == "fp8 per block of (128, 64)"
    with pytest.raises(CheckpointError, match="num_bits"):
        QuantArgs.parse({"num_bits": "many"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"config_groups": {}}, "no config_groups"),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "group_0 says nothing of weights"),
        (compressed(group_0={"weights": FP8, "output_activations": FP8}), "group_0 quantizes outputs"),
        ({**compressed(group_0={"weights": FP8}), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (
            {**compressed(group_0={"weights": FP8}), "transform_config": {"config_groups": {"u": {}}}},
            "transform_config",
        ),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CompressedConfig.parse(config)


def test_parts_of_a_merged_layer_must_agree() -> None:
    parts = tuple(LinearPart(name=name, out_features=4) for name in ("a.q_proj", "a.k_proj"))
    spec = LinearSpec(parts=parts, in_features=4, bias=False, dtype="float32")
    assert same_for_all(spec, lambda name: 7) == 7
    with pytest.raises(CheckpointError, match=r"a.q_proj as unquantized but a.k_proj as 7"):
        same_for_all(spec, lambda name: None if "q_proj" in name else 7)
