"""Quantized checkpoints in whole models that ranks share, against one rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError
from engine.plugins.quant.w8_cpu import DequantizeAtLoadKernel, IntegerKernel
from engine.plugins.quant.w8_kernel import W8Kernel
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import threaded_ranks

from .packers import Weight, quantize_checkpoint
from .w8_packers import (
    compressed,
    fp8_blocks,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    number,
    quantized,
    with_tensors,
)

PROMPT = [(37 * place) % 500 for place in range(30)]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 1, "initializer_range": 0.1}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CHANNEL = compressed("float-quantized", number("float", "channel"), number("float", "token", dynamic=True))
INT8 = compressed("int-quantized", number("int", "channel"), number("int", "token", dynamic=True))
EIGHT_BITS = {
    "fp8 a tensor": (fp8_per_tensor(), FP8, {}),
    "fp8 static": (fp8_per_tensor(input_scale=0.01), FP8 | {"activation_scheme": "static"}, {}),
    "fp8 a channel": (fp8_per_channel, CHANNEL, {}),
    "fp8 a block": (fp8_blocks("weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}, {}),
    "int8": (int8_per_channel, INT8, {"quant__options": {"activations": "none"}}),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 32}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FEW_BITS = {
    "gptq": (GPTQ, {}),
    "gptq, act-order": (GPTQ | {"desc_act": True}, {"ordered": True}),
    "awq": (AWQ, {}),
    "compressed": (compressed("pack-quantized", PACKED, None), {}),
    "compressed, act-order": (compressed("pack-quantized", PACKED | {"actorder": "group"}, None), {"ordered": True}),
}


def scores(path: Any, ranks: int = 1, **settings: Any) -> Any:
    """Greedy tokens, and log probabilities of them and of the prompt's."""
    if ranks > 1:
        settings["executor"] = threaded_ranks(ranks)
    settings = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "4MiB", **settings}
    with Engine(model=str(path), **settings) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        [done] = engine.generate([PROMPT], params)
        return done.token_ids, torch.tensor([one.logprob for one in (*done.prompt_logprobs, *done.logprobs)])


def assert_same(path: Any, ranks: Any, **settings: Any) -> None:
    expected_tokens, expected = scores(path, **settings)
    tokens, found = scores(path, ranks, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert tokens == expected_tokens


INT8_STATIC = compressed("int-quantized", number("int", "channel"), number("int", "tensor"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", tokenizer=True, **SIZES, **HEADS)


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_w8_ranks_compute_what_one_does(case: Any, plain: Any, tmp_path: Path) -> None:
    packer, config, settings = EIGHT_BITS[case]
    stored, _ = quantized(plain, tmp_path, packer, config)
    assert_same(stored, 2, **settings)


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_scales_computed_at_load_are_per_rank(method: str, plain: Any) -> None:
    """Where a rank has some of the inputs its scales are for those, so that results differ a little from one rank's."""
    _, whole = scores(plain)
    _, one = scores(plain, quant__name=method)
    _, two = scores(plain, 2, quant__name=method)
    prompt = len(PROMPT) - 1
    error, shared_error = (float((found - whole)[:prompt].norm() / whole[:prompt].norm()) for found in (one, two))
    assert 1e-5 < shared_error < max(1.5 * error, 0.01)


def quantize_by_halves(kernel: type[W8Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one rank compute row-parallel layers as two do: quantize each half of the inputs alone, and add the sums."""
    prepare, apply = kernel.prepare, kernel.apply

    def prepare_halves(self: W8Kernel, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if self.spec.parallel != "row":
            return prepare(self, loaded)
        halves = [{name: tensor.chunk(2, 1)[half] for name, tensor in loaded.items()} for half in (0, 1)]
        return {f"{at} {name}": made for at, half in enumerate(halves) for name, made in prepare(self, half).items()}

    def apply_halves(self: W8Kernel, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: Any) -> torch.Tensor:
        if self.spec.parallel != "row":
            return apply(self, x, weights, bias)
        first, second = (
            apply(self, part, {name[2:]: made for name, made in weights.items() if name[0] == at}, added)
            for at, part, added in zip("01", x.chunk(2, -1), (bias, None), strict=True)
        )
        return first + second

    monkeypatch.setattr(kernel, "prepare", prepare_halves)
    monkeypatch.setattr(kernel, "apply", apply_halves)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])  # whose projections are stored apart, and fused
@pytest.mark.parametrize(("method", "kernel"), [("int8", IntegerKernel), ("fp8", DequantizeAtLoadKernel)])
def test_ranks_that_quantize_at_load_differ_from_one_by_their_scales_only(
    method: str, kernel: type[W8Kernel], architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "model", architecture, tokenizer=True)
    _, one = scores(path, quant__name=method)
    tokens, two = scores(path, 2, quant__name=method)
    quantize_by_halves(kernel, monkeypatch)
    tokens_by_halves, by_halves = scores(path, quant__name=method)
    torch.testing.assert_close(two, by_halves, rtol=1e-4, atol=1e-4)
    assert tokens == tokens_by_halves
    assert float((two - one).abs().max()) > 1e-2


def test_int8_with_static_scales_is_the_same_on_two_ranks(plain: Any, tmp_path: Path) -> None:
    packer = with_tensors(int8_per_channel, lambda module: {"input_scale": torch.tensor([0.05])})
    stored, _ = quantized(plain, tmp_path, packer, INT8_STATIC)
    assert_same(stored, 2)


def test_int8_with_scales_per_rank_is_no_further_from_unquantized(plain: Any, tmp_path: Path) -> None:
    """Ranks compute scales of their own inputs, so results differ; docs/quantization.md gives the size."""
    stored, exact = quantized(plain, tmp_path, int8_per_channel, INT8)
    _, expected = scores(exact)
    errors = {}
    for ranks in (1, 2, 4):
        _, found = scores(stored, ranks)
        errors[ranks] = float((found - expected).norm() / expected.norm())
    assert 0 < errors[1] < 0.05
    assert errors[4] < errors[2] < errors[1]


def test_log_names_scales_per_rank(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        scores(plain, quant="int8")
    one = {record.getMessage() for record in caplog.records if "int8 products" in record.getMessage()}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        scores(plain, 2, quant="int8")
    two = {record.getMessage() for record in caplog.records if "int8 products" in record.getMessage()}
    assert [line for line in one if "per rank" in line or "and rank" in line] == []
    assert len([line for line in two if "per token and rank (first: model.layers.0.self_attn.o_proj)" in line]) == 1


@pytest.mark.parametrize("case", FEW_BITS)
def test_w4a16_ranks_compute_what_one_does(case: Any, tmp_path: Path) -> None:
    config, options = FEW_BITS[case]
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256}
    source = make_checkpoint(tmp_path / "plain", "llama", tokenizer=True, **sizes)

    def make(module: Any, shape: Any) -> Any:
        weight = Weight(*shape, symmetric=False, seed=shape[1], **options)
        if config["quant_method"] == "compressed-tensors":
            return weight.compressed(symmetric=False, ordered="ordered" in options), weight.plain
        return getattr(weight, config["quant_method"])(), weight.plain

    quantize_checkpoint(source, tmp_path / "quantized", config, make)
    assert_same(tmp_path / "quantized", 2)


WIDE = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
"""Of which four ranks have whole blocks of 128."""
ON_GPUS = ["none", "fp8 a channel", "fp8 a block", "int8", "gptq", "awq", "compressed"]
TIE = 0.1
"""Nats by which rounding to bfloat16 may set apart tokens that are about equally likely; others fall short by 4."""


def stored_as(case: Any, plain: Any, directory: Any) -> Any:
    """A checkpoint quantized in the format of this name."""
    if case == "none":
        return plain
    if case in EIGHT_BITS:
        packer, config, _ = EIGHT_BITS[case]
        return quantized(plain, directory, packer, config)[0]
    config, _ = FEW_BITS[case]

    def make(module: Any, shape: Any) -> Any:
        weight = Weight(*shape, symmetric=False, seed=shape[1])
        if config["quant_method"] == "compressed-tensors":
            return weight.compressed(symmetric=False, ordered=False), weight.plain
        return getattr(weight, config["quant_method"])(), weight.plain

    quantize_checkpoint(plain, directory / "quantized", config, make)
    return directory / "quantized"


def shortfalls(engine: Any, tokens: Any) -> Any:
    """Nats by which each token, behind PROMPT and those before it, is less likely than this engine's own choice."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    [done] = engine.generate([[*PROMPT, *tokens]], params)
    entries = done.prompt_logprobs[-len(tokens) :]
    return torch.tensor([one.top[0][1] - one.logprob for one in entries])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "model", "llama", tokenizer=True, **WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("case", ON_GPUS)
def test_ranks_on_gpus_choose_the_tokens_of_one(
    case: Any, graphs: str, ranks: int, plain: Any, wide: Any, tmp_path: Path
) -> None:
    """In bfloat16, by NCCL and peer memory: several ranks choose what one does, but for ties."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    path = stored_as(case, wide if ranks > 2 else plain, tmp_path)
    settings = {"executor__device": "cuda", "model__dtype": "bfloat16", "cache__memory": "64MiB", "model__max_len": 256}
    settings |= {"executor__graphs": graphs, "scheduler__max_batch_tokens": 32}  # of more, activations are quantized
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with Engine(model=str(path), executor__tensor_parallel=ranks, **settings) as several:
        [shared] = several.generate([PROMPT], params)
    with Engine(model=str(path), **settings) as one:
        [alone] = one.generate([PROMPT], params)
        assert shortfalls(one, alone.token_ids).max() < TIE
        assert shortfalls(one, shared.token_ids).max() < TIE
        assert shortfalls(one, PROMPT[:24]).median() > 20 * TIE


def test_quantized_kv_head_replicas_equal_one_rank(tmp_path: Path) -> None:
    """Two heads of keys on four ranks: quantized tensors are read twice like plain ones."""
    source = make_checkpoint(tmp_path / "plain", "qwen2", tokenizer=True, **SIZES, num_key_value_heads=2)
    stored, _ = quantized(source, tmp_path, fp8_per_channel, CHANNEL)
    assert_same(stored, 4)


def test_blocks_that_ranks_would_cut_are_refused_before_loading(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "plain", "llama", tokenizer=True, **SIZES, num_key_value_heads=4)
    stored, _ = quantized(source, tmp_path, fp8_blocks("weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match=r"2 ranks cannot share .*q_proj: each would have 64 of its 128 outputs"):
        scores(stored, 2)
