"""The roofline against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.ceilings import Ceilings
from engine.cli.bench.roofline import Roofline, Shape, configured_roofline, make_work, measured_roofline, stored_bits
from engine.core import Engine, EngineConfig
from engine.core.config.tree import ExecutorConfig, ModelConfig
from engine.core.errors import CheckpointError

H200 = Ceilings(bandwidth=4.28e12, flops=814e12, source="measured before")

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GROUPS_OF_128 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}, "input_activations": None}},
}
TOKEN_WISE = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel", "group_size": None}}},
}
LLAMA_LAYERS = 32 * 218_103_808  # 4096 x (4096 + 1024 + 1024) + 4096 x 4096 + 3 x 4096 x 14336


def roofline(config: dict[str, Any], quantized: bool = False, loaded_bytes: int | None = None) -> Roofline:
    work = make_work(config, dtype="bfloat16", kv_dtype="bfloat16", quantized=quantized, loaded_bytes=loaded_bytes)
    return Roofline(work=work, ceilings=H200)


def test_weights_of_the_layers() -> None:
    assert Shape.from_config(LLAMA).linear_weights == LLAMA_LAYERS == 6_979_321_856
    assert Shape.from_config(LLAMA).head_weights == 525_336_576
    assert Shape.from_config(QWEN).linear_weights == 28 * 15_728_640


@pytest.mark.parametrize(
    ("config", "quantized", "milliseconds"),
    [
        (LLAMA, False, 3.507),
        (QWEN, False, 0.2785),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, True, 1.876),
        (LLAMA | {"quantization_config": TOKEN_WISE}, True, 1.876),
        (LLAMA | {"quantization_config": GROUPS_OF_128}, True, 1.086),
    ],
    ids=["8B", "0.6B", "8B fp8", "8B int8", "8B 4-bit"],
)
def test_reading_the_weights(config: dict[str, Any], quantized: bool, milliseconds: float) -> None:
    assert roofline(config, quantized).weights() * 1e3 == pytest.approx(milliseconds, abs=0.001)


def test_weights_quantized_while_loading_are_counted_by_what_they_take() -> None:
    # Beside the layers in 8 bits, the device holds the embedding and the LM head in 16.
    loaded = LLAMA_LAYERS + 2 * 2 * 525_336_576
    assert roofline(LLAMA, True, loaded).work.weight_bits == 8
    assert roofline(QWEN, True, 28 * 15_728_640 + 2 * 151936 * 1024).work.weight_bits == 8
    with pytest.raises(CheckpointError, match="how many bits"):
        roofline(LLAMA, True)


def test_a_copy_kept_beside_the_quantized_weights_is_no_work() -> None:
    assert roofline(LLAMA, True, 10 * LLAMA_LAYERS).work.weight_bits == 16


def test_a_decode_step_reads_keys_and_values() -> None:
    llama = roofline(LLAMA)
    assert llama.work.kv_bytes == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    seconds = llama.decode(64, 1000) - llama.weights()
    assert seconds == pytest.approx(64 * 1000 * 131_072 / 4.28e12)


def test_a_large_batch_is_bound_by_operations() -> None:
    llama = roofline(LLAMA)
    linear = 2 * (LLAMA_LAYERS + 525_336_576)
    attention = 4 * 32 * 32 * 128 * 10
    assert llama.decode(4096, 10) == pytest.approx(4096 * (linear + attention) / 814e12)


def test_prefill_counts_one_row_of_logits_a_prompt() -> None:
    pairs = 2048 * 2049 // 2
    flops = 2 * LLAMA_LAYERS * 2048 + 2 * 525_336_576 + 4 * 32 * 32 * 128 * pairs
    assert roofline(LLAMA).prefill([2048] * 16) == pytest.approx(16 * flops / 814e12)


def test_a_load_with_few_tokens_to_decode_is_bound_by_operations_and_one_with_many_by_bytes() -> None:
    llama = roofline(LLAMA)
    assert llama.load([(2048, 1)] * 16, 256) == pytest.approx(llama.prefill([2048] * 16))
    # One request: the prompt's step and 127 decodes, over contexts of 4 + 1 to 4 + 127.
    contexts = 127 * 4 + 127 * 128 // 2
    moved = 128 * llama.work.weight_bytes + contexts * 131_072
    assert llama.load([(4, 128)], 256) == pytest.approx(moved / 4.28e12)


def test_more_requests_than_may_run_take_more_steps() -> None:
    llama = roofline(LLAMA)
    assert llama.load([(4, 128)] * 8, 2) == pytest.approx(4 * llama.load([(4, 128)] * 2, 2), rel=0.01)


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        (None, None),
        ({"quant_method": "unheard"}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4.25),
        ({"quant_method": "fp8"}, 8.0),
        (GROUPS_OF_128, 4.125),
    ],
)
def test_bits_of_a_weight(stored: dict[str, Any] | None, bits: float | None) -> None:
    assert stored_bits(stored) == bits


def test_a_mixture_of_experts_has_no_roofline() -> None:
    with pytest.raises(CheckpointError, match="mixture of experts"):
        Shape.from_config(LLAMA | {"num_local_experts": 8})


def test_an_engine_and_its_configuration_give_the_same_roofline(tiny: Path) -> None:
    with Engine(model=str(tiny), executor__device="cpu", cache__memory="8MiB") as engine:
        pass
    of_engine = measured_roofline(engine, 0.01, 0.1)
    config = EngineConfig(model=ModelConfig(path=str(tiny)), executor=ExecutorConfig(device="cpu"))
    assert of_engine is not None
    assert of_engine == configured_roofline(config, 0.01, 0.1)
    # Two layers: q, k, v, output 64 x (64 + 32 + 32) + 64 x 64, and 3 x 64 x 96; the LM head 512 x 64; in float32.
    assert of_engine.work.weight_bytes == 4 * (2 * (64 * 192 + 3 * 64 * 96) + 512 * 64)
