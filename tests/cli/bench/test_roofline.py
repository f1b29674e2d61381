"""The roofline against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.ceilings import Ceilings
from engine.cli.bench.roofline import (
    Roofline,
    configured_roofline,
    configured_running,
    find_roofline,
    measured_roofline,
    stored_cost,
    weight_bits,
)
from engine.core import Engine, EngineConfig, plugin_host
from engine.core.config.tree import ExecutorConfig, ModelConfig, QuantConfig, SchedulerConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.host import Host
from engine.core.plugin_host import derived, load_plugins
from engine.core.profiling import ModelCost, ModuleCost
from tests.core.runner import state_models

CPU = DeviceInfo(type="cpu")
H200 = Ceilings(bandwidth=4.28e12, flops=814e12, source="measured before")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
LLAMA_LAYERS = 32 * 218_103_808  # 4096 x (4096 + 1024 + 1024) + 4096 x 4096 + 3 x 4096 x 14336
LLAMA_HEAD = 525_336_576
LLAMA_NORMS = 65 * 4096


def roofline(config: dict[str, Any]) -> Roofline:
    engine_config = EngineConfig(model=ModelConfig(dtype="bfloat16"), executor=ExecutorConfig(device="cpu"))
    return Roofline(cost=stored_cost(engine_config, config, CPU), ceilings=H200)


@pytest.fixture(scope="module")
def llama() -> Roofline:
    return roofline(LLAMA)


def test_weight_bytes_are_those_of_the_layers(llama: Roofline) -> None:
    assert llama.weight_bytes == 2 * (LLAMA_LAYERS + LLAMA_HEAD + LLAMA_NORMS)


@pytest.mark.parametrize(
    ("config", "milliseconds", "bits"),
    [
        (LLAMA, 3.507, 16),
        (QWEN, 0.2785, 16),
        (LLAMA | {"quantization_config": FP8}, 1.876, 8),
        (LLAMA | {"quantization_config": GPTQ}, 1.093, 4.16),
    ],
    ids=["8B", "0.6B", "8B fp8", "8B 4-bit"],
)
def test_reading_the_weights_takes_their_bytes_over_the_bandwidth(
    config: dict[str, Any], milliseconds: float, bits: float
) -> None:
    found = roofline(config)
    assert found.weights() * 1e3 == pytest.approx(milliseconds, rel=0.002)
    assert weight_bits(found.cost) == pytest.approx(bits, abs=0.02)


def test_weights_quantized_while_loading_have_no_size_before() -> None:
    config = EngineConfig(quant=QuantConfig(name="fp8"), executor=ExecutorConfig(device="cpu"))
    with pytest.raises(CheckpointError, match="how many bits"):
        stored_cost(config, LLAMA, CPU)


def test_a_model_with_unknown_operations_has_no_roofline() -> None:
    known = ModuleCost(name="a", kind="linear", weight_bytes=1)
    with pytest.raises(CheckpointError, match=r"operations of conv\.weight and 1 others are unknown"):
        find_roofline(ModelCost(modules=(known,), uncounted=("conv.weight", "b")), CPU, "float32", 1, 1)


def test_a_mixture_of_experts_reads_those_that_its_tokens_choose() -> None:
    experts = ModuleCost(name="e", kind="experts", num_experts=8, top_k=2, expert_bytes=8000, flops_per_row=2 * 2 * 500)
    found = Roofline(cost=ModelCost(modules=(experts,)), ceilings=H200)
    assert weight_bits(found.cost) == 16
    assert found.decode(1, 10) == pytest.approx(2000 / 4.28e12)
    assert found.decode(10, 10) == pytest.approx(8000 * (1 - 0.75**10) / 4.28e12)


def test_a_decode_step_reads_keys_and_values_and_writes_those_of_its_tokens(llama: Roofline) -> None:
    seconds = llama.decode(64, 1000) - llama.weights()
    assert seconds == pytest.approx(64 * (1000 + 1) * 131_072 / 4.28e12)  # 2 x 32 layers x 8 heads x 128 x 2 bytes


def test_a_large_batch_is_bound_by_operations(llama: Roofline) -> None:
    linear = 2 * (LLAMA_LAYERS + LLAMA_HEAD)
    attention = 4 * 32 * 32 * 128 * 10
    assert llama.decode(4096, 10) == pytest.approx(4096 * (linear + attention) / 814e12)


def test_prefill_counts_one_row_of_logits_a_prompt(llama: Roofline) -> None:
    pairs = 2048 * 2049 // 2
    flops = 2 * LLAMA_LAYERS * 2048 + 2 * LLAMA_HEAD + 4 * 32 * 32 * 128 * pairs
    assert llama.prefill([2048] * 16) == pytest.approx(16 * flops / 814e12)


def test_a_load_with_few_tokens_to_decode_is_bound_by_operations_and_one_with_many_by_bytes(llama: Roofline) -> None:
    assert llama.load([(2048, 1)] * 16, 256) == pytest.approx(llama.prefill([2048] * 16))
    # One request: the prompt's step and 127 decodes, over contexts of 4 + 1 to 4 + 127.
    contexts = 127 * 4 + 127 * 128 // 2
    moved = 128 * llama.weight_bytes + (4 + contexts + 4 + 127) * 131_072  # the prompt's keys, and those written
    assert llama.load([(4, 128)], 256) == pytest.approx(moved / 4.28e12)


def test_more_requests_than_may_run_take_more_steps(llama: Roofline) -> None:
    assert llama.load([(4, 128)] * 8, 2) == pytest.approx(4 * llama.load([(4, 128)] * 2, 2), rel=0.01)


def test_an_engine_and_its_configuration_give_the_same_roofline(tiny: Path) -> None:
    with Engine(model=str(tiny), executor__device="cpu", cache__memory="8MiB") as engine:
        pass
    of_engine = measured_roofline(engine, 0.01, 0.1)
    config = EngineConfig(model=ModelConfig(path=str(tiny)), executor=ExecutorConfig(device="cpu"))
    assert of_engine is not None
    assert of_engine == configured_roofline(config, 0.01, 0.1)
    # Two layers: q, k, v, output 64 x (64 + 32 + 32) + 64 x 64, and 3 x 64 x 96; the LM head 512 x 64; five norms.
    assert of_engine.weight_bytes == 4 * (2 * (64 * 192 + 3 * 64 * 96) + 512 * 64 + 5 * 64)


def test_as_many_requests_run_as_in_an_engine_when_layers_keep_states(
    engine_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 4 * (2 * (2 * 4 * 6 + 16) + 16)
    monkeypatch.setattr(Host, "free_memory", lambda _: 10**9)
    monkeypatch.setattr(derived, "STATES_SHARE", 6 * each / 10**9)
    monkeypatch.setattr(plugin_host, "load_plugins", lambda _: load_plugins(extra=[state_models]))
    path, cpu = str(engine_checkpoint), ExecutorConfig(device="cpu")
    for name, running, expected in (("two-shapes", 0, 5), ("two-shapes", 7, 7), ("auto", 0, 256)):
        model, scheduler = ModelConfig(path=path, name=name), SchedulerConfig(max_running=running)
        config = EngineConfig(model=model, scheduler=scheduler, executor=cpu)
        assert configured_running(config) == expected
