"""Rotary embedding against transformers' own tables, and the two layouts of its parameters."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.errors import CheckpointError
from engine.core.layers.rotary import (
    GrowingRotary,
    Rotary,
    RotarySpec,
    refuses_rope,
    rotate,
    rotate_interleaved,
    rotate_pairs,
    yarn_sharpness,
)

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.01 * pair for pair in range(64)],
    "long_factor": [1 + 0.5 * pair for pair in range(64)],
}

TABLES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    {**YARN, "rope_theta": 1e6},
    {**YARN, "rope_theta": 1e6, "truncate": False},
    {**YARN, "rope_theta": 1e6, "attention_factor": 1.25},
    {**YARN, "rope_theta": 10000.0, "beta_fast": 8, "beta_slow": 8, "truncate": False},
    {**YARN, "rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "rope_theta": 10000.0, "factor": 1.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    {**LONGROPE, "original_max_position_embeddings": 16384, "rope_theta": 10000.0},
    {**LONGROPE, "original_max_position_embeddings": 20000, "rope_theta": 10000.0, "attention_factor": 1.2},
]


@pytest.mark.parametrize("parameters", TABLES, ids=lambda parameters: "-".join(map(str, parameters.values())))
def test_angles_equal_transformers(parameters: Any) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    longest = 16384
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=dict(parameters)
    )
    positions = torch.tensor([0, 1, 17, 4095, 4096, 10000, longest - 1])
    theirs = LlamaRotaryEmbedding(config)
    spec = RotarySpec.from_config({"max_position_embeddings": longest, "rope_parameters": parameters}, 128)
    frequencies, _ = spec.frequencies()
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-7, atol=0)
    cos, sin = Rotary(spec, "float32", "cpu").angles(positions)
    expected_cos, expected_sin = theirs(torch.empty(1), positions[None])
    # A last bit of a frequency, times the position, is what the angles may differ by.
    torch.testing.assert_close(cos[:, 0], expected_cos[0], rtol=0, atol=3e-3)
    torch.testing.assert_close(sin[:, 0, 64:], expected_sin[0, :, 64:], rtol=0, atol=3e-3)
    torch.testing.assert_close(cos[:4, 0], expected_cos[0, :4], rtol=0, atol=5e-4)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 500000.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 40.0, "original_max_position_embeddings": 4096},
    ],
    ids=["default", "linear", "yarn", "yarn, larger theta"],
)
def test_frequencies_equal_transformers_to_the_last_bit(parameters: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=40 * 4096,
        rope_parameters=dict(parameters),
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = RotarySpec.from_config({"rope_parameters": parameters}, head_dim).frequencies()
    assert torch.equal(ours, theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("parameters", "served"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 9000),
        ({**LONGROPE, "original_max_position_embeddings": 1024}, 1024),
        ({**LONGROPE, "original_max_position_embeddings": 1024}, 1025),
    ],
    ids=["dynamic, trained", "dynamic, extended", "longrope, short", "longrope, long"],
)
def test_frequencies_of_the_longest_served_context_equal_transformers(parameters: Any, served: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = {**parameters, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=table)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=served)
    spec = RotarySpec.from_config({"max_position_embeddings": 4096, "rope_parameters": table}, 128)
    ours, factor = evolve(spec, max_len=served).frequencies()
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
    assert factor == pytest.approx(their_factor)


def test_rotate_interleaved_turns_adjacent_dimensions_and_leaves_the_rest() -> None:
    spec = RotarySpec(rotary_dim=8, type="default", parameters={"rope_theta": 100.0}, interleaved=True)
    frequencies, _ = spec.frequencies()
    positions = torch.tensor([0, 3, 1000])
    x = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(0))
    turned = rotate_interleaved(x, Rotary(spec, "float32", "cpu").angles(positions))
    plane = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous())
    angle = (positions[:, None].float() * frequencies)[:, None]
    expected = torch.view_as_real(plane * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(turned[..., :8], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[..., 8:], x[..., 8:])


def test_rotate_turns_each_pair_by_its_angle() -> None:
    spec = RotarySpec(rotary_dim=8, type="default", parameters={"rope_theta": 100.0})
    frequencies, _ = spec.frequencies()
    positions = torch.tensor([0, 3, 1000])
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, Rotary(spec, "float32", "cpu").angles(positions))
    plane = torch.complex(x[..., :4], x[..., 4:])
    angle = (positions[:, None].float() * frequencies)[:, None]
    expected = plane * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[0], x[0])


def test_rotate_leaves_dimensions_beyond_rotary_dim() -> None:
    spec = RotarySpec.from_config({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, 16)
    assert spec.rotary_dim == 8
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    angles = Rotary(spec, "float32", "cpu").angles(torch.tensor([1, 2, 3]))
    turned = rotate(x, angles)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8], rotate(x[..., :8], angles))


def test_angles_have_the_models_dtype() -> None:
    spec = RotarySpec(rotary_dim=8, type="default", parameters={})
    exact = Rotary(spec, "float32", "cpu").angles(torch.tensor([7777]))
    for ours, precise in zip(Rotary(spec, "bfloat16", "cpu").angles(torch.tensor([7777])), exact, strict=True):
        assert torch.equal(ours, precise.to(torch.bfloat16))


def test_factors_of_growing_queries_change_at_each_multiple_of_the_original_context() -> None:
    parameters = {"original_max_position_embeddings": 64}
    spec = RotarySpec(rotary_dim=8, type="default", parameters=parameters, query_growth=0.1)
    plain, positions = Rotary(spec, "float32", "cpu"), torch.tensor([0, 63, 64, 127, 128, 6400])
    cos, sin, factors = GrowingRotary(plain, spec, "float32").angles(positions)
    for ours, theirs in zip((cos, sin), plain.angles(positions), strict=True):
        assert torch.equal(ours, theirs)
    assert factors.shape == (6, 1, 1)
    wanted = [1 + 0.1 * math.log(1 + times) for times in (0, 0, 1, 1, 2, 100)]
    torch.testing.assert_close(factors.flatten(), torch.tensor(wanted))


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 2.0}, YARN])
def test_both_layouts_of_parameters_are_equivalent(scaling: Any) -> None:
    older = {key: value for key, value in scaling.items() if key != "rope_type"} | {"type": scaling["rope_type"]}
    common = {"max_position_embeddings": 8192}
    new = RotarySpec.from_config({**common, "rope_parameters": {**scaling, "rope_theta": 5e5}}, 64)
    old = RotarySpec.from_config({**common, "rope_theta": 5e5, "rope_scaling": older}, 64)
    assert new.type == old.type == scaling["rope_type"]
    assert torch.equal(new.frequencies()[0], old.frequencies()[0])
    assert new.frequencies()[1] == old.frequencies()[1]


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_parameters": None, "rope_scaling": {}}])
def test_missing_parameters_mean_the_default_type(config: Any) -> None:
    spec = RotarySpec.from_config(config, 64)
    assert spec.type == "default"
    assert float(spec.frequencies()[0][-1]) == pytest.approx(10000 ** (-62 / 64))


def test_unknown_types_are_refused_by_name() -> None:
    for kind in ("mrope", "proportional"):
        config = {"rope_scaling": {"type": kind, "factor": 2.0}}
        assert f"{kind!r}" in (refuses_rope(config) or "")
        with pytest.raises(CheckpointError, match=kind):
            RotarySpec.from_config(config, 64)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({**YARN, "factor": "4"}, "'factor' is '4'"),
        ({**YARN, "factor": 0}, "'factor' is 0.0; it must be at least 1"),
        ({**YARN, "rope_theta": 1.0}, "'rope_theta' is 1.0"),
        ({"rope_type": "yarn", "factor": 4.0}, "'original_max_position_embeddings'"),
        ({**LLAMA3, "original_max_position_embeddings": 64, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "0 of 64 dimensions"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "96 of 64 dimensions"),
    ],
)
def test_missing_or_wrong_parameters_are_an_error(parameters: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        RotarySpec.from_config({"rope_parameters": parameters}, 64)


def test_rotate_pairs_takes_the_angles_of_either_rotary_embedding() -> None:
    """Those with a factor on cosine and sine, and heads of bfloat16 too."""
    parameters = {**YARN, "rope_theta": 10000.0, "attention_factor": 1.25}
    spec = RotarySpec.from_config({"max_position_embeddings": 16384, "rope_parameters": parameters}, 8)
    positions, x = torch.arange(5), torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1))
    plain = Rotary(spec, "float32", "cpu").angles(positions)
    frequencies, factor = spec.frequencies()
    radians = positions[:, None] * frequencies
    fused = radians.cos() * factor, radians.sin() * factor  # as FusedRotary returns them
    expected = rotate_interleaved(x, plain)
    for angles in (plain, fused):
        torch.testing.assert_close(rotate_pairs(x, angles), expected)
        half = rotate_pairs(x.bfloat16(), angles)
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.05)


def test_yarn_sharpness_is_that_of_mscale_all_dim() -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

    for more in ({}, {"mscale_all_dim": 0.707}, {"mscale_all_dim": 0.0}, {"mscale_all_dim": 0.7, "factor": 1.0}):
        parameters = {**YARN, "rope_theta": 10000.0, **more}
        spec = RotarySpec.from_config({"max_position_embeddings": 16384, "rope_parameters": parameters}, 8)
        assert yarn_sharpness(spec) ** 2 == pytest.approx(yarn_apply_mscale(parameters, 1.0))
    assert yarn_sharpness(None) == 1.0
