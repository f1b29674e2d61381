"""A quantized output layer, in every format that has one, against its dequantized twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.errors import ConfigError
from engine.core.layers import LayerFactory
from engine.core.quant.base import QuantMethod
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.fp8 import Fp8
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.int8 import Int8
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import LoneRank, threaded_ranks

from .packers import Weight
from .w8_packers import compressed, fp8_per_channel, number, quantized

PROMPT = [(7 * i + i * i) % 500 for i in range(20)]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "lm_head": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "block_name_to_quantize": "model.layers",
    "extra_config": {"lm_head": {"bits": 8, "group_size": 32, "sym": True}},
}
CHANNEL = number("float", "channel")
TOKEN = number("float", "token", dynamic=True)
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def gptq(module: str, weight: Any) -> Any:
    made = Weight(*weight.shape, bits=4, seed=len(module))
    return made.gptq(), made.plain


def auto_round(module: str, weight: Any) -> Any:
    made = Weight(*weight.shape, bits=8 if module == "lm_head" else 4, seed=len(module))
    return made.gptq(stored_order=False), made.plain


def packed(module: str, weight: Any) -> Any:
    made = Weight(*weight.shape, bits=4, seed=len(module))
    return made.compressed(symmetric=True, ordered=False), made.plain


CASES = {
    "gptq": (gptq, GPTQ),
    "auto-round": (auto_round, AUTO_ROUND),
    "compressed-tensors, packed": (packed, compressed("pack-quantized", PACKED, None, ignore=[])),
    "compressed-tensors, float8": (fp8_per_channel, compressed("float-quantized", CHANNEL, TOKEN, ignore=[])),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama", tokenizer=True, **SIZES)


def answers(path: Any, ranks: int = 1, **settings: Any) -> Any:
    """Greedy tokens, by logits and without them, and log probabilities."""
    if ranks > 1:
        settings["executor"] = threaded_ranks(ranks)
    settings = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "4MiB", **settings}
    with Engine(model=str(path), **settings) as engine:
        params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        [greedy] = engine.generate([PROMPT], SamplingParams(**params))
        [scored] = engine.generate([PROMPT], SamplingParams(**params, logprobs=0, prompt_logprobs=0))
        scores = [one.logprob for one in (*scored.prompt_logprobs, *scored.logprobs)]
        return list(greedy.token_ids), list(scored.token_ids), torch.tensor(scores)


@pytest.mark.parametrize("case", CASES)
def test_quantized_head_computes_what_its_dequantized_twin_does(case: str, plain: Any, tmp_path: Path) -> None:
    packer, config = CASES[case]
    stored, meant = quantized(plain, tmp_path, packer, config, head=True)
    greedy, tokens, scores = answers(stored)
    expected_greedy, expected_tokens, expected = answers(meant)
    assert greedy == tokens == expected_tokens == expected_greedy
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_ranks_share_a_quantized_head(plain: Any, tmp_path: Path) -> None:
    stored, _ = quantized(plain, tmp_path, gptq, GPTQ, head=True)
    greedy, tokens, scores = answers(stored, 2)
    expected_greedy, expected_tokens, expected = answers(stored)
    assert (greedy, tokens) == (expected_greedy, expected_tokens)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_vocabulary_that_ranks_cannot_share_evenly_is_refused() -> None:
    quant = Fp8.from_checkpoint(CASES["compressed-tensors, float8"][1], None)
    layers = LayerFactory(dtype="float32", device="cpu", quant=quant, group=LoneRank(0, 2))
    with pytest.raises(ConfigError, match="2 ranks cannot share 51 outputs of lm_head"):
        layers.lm_head("lm_head", 51, 64)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Fp8, None),
        (Int8, None),
        (Fp8, {"quant_method": "fp8"}),
        (Gptq, GPTQ | {"lm_head": False}),
        (CompressedTensors, compressed("pack-quantized", PACKED, None)),
    ],
)
def test_head_stays_unquantized_where_nothing_says_otherwise(method: type[QuantMethod[Any]], config: Any) -> None:
    layers = LayerFactory(dtype="float32", device="cpu", quant=method.from_checkpoint(config, None))
    layers.lm_head("lm_head", 64, 64)
    assert {name for layer in layers.layers for name in layer.tensors()} == {"lm_head.weight"}


def test_tied_head_stays_the_embedding() -> None:
    config = CASES["compressed-tensors, packed"][1]
    quant = CompressedTensors.from_checkpoint(config, None)
    layers = LayerFactory(dtype="float32", device="cpu", quant=quant)
    table = layers.embedding("model.embed_tokens", 64, 64)
    layers.lm_head("lm_head", 64, 64, table)
    assert {name for layer in layers.layers for name in layer.tensors()} == {"model.embed_tokens.weight"}
