"""DeepSeek-V2-Lite through the whole engine, with its latent KV cache, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from attrs import evolve

from engine.core import Engine, SamplingParams
from engine.core.config.tree import AttentionConfig, CacheConfig, EngineConfig, ModelConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError, PluginError
from engine.core.plugin_host import load_plugins, resolve
from engine.core.runner import graph_capture, start_graphs
from engine.core.weights import Checkpoint
from engine.plugins.attention.triton import TritonAttention
from engine.plugins.models.deepseek_v2 import DeepseekV2
from engine.plugins.quant.int8 import Int8
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.models import ModelConformance
from engine.testing.ranks import threaded_ranks
from tests.core.runner.replays import ReplayByRunning
from tests.plugins.quant.w8_packers import compressed, int8_per_channel, number, quantized, with_tensors
from tests.reference_tokens import greedy_tokens

from .families import FAMILIES

NAME = "deepseek_v2"
CPU = DeviceInfo(type="cpu")
GPU = DeviceInfo(type="cuda", capability=(9, 0))
CONFIG = FAMILIES[NAME].config
PROMPTS = [[(11 * row + 5 * column + row * column) % 500 for column in range(5 + 17 * row)] for row in range(3)]
STEPS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "model__name": NAME,
    "executor__device": "cpu",
    "model__dtype": "float32",
    "cache__memory": "1MiB",
}


class TestDeepseekV2(ModelConformance):
    model = DeepseekV2
    architecture = NAME
    config = CONFIG
    rerouted = 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, of which one is dense."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), NAME, tokenizer=True, **CONFIG)


def test_greedy_tokens_equal_transformers_in_chunks_and_with_cached_prefixes_on_one_rank_and_two(
    checkpoint: Path,
) -> None:
    expected = greedy_tokens(checkpoint, PROMPTS, STEPS)
    for more in ({}, {"executor": threaded_ranks(2), "executor__expert_parallel": True}):
        with Engine(model=str(checkpoint), **SETTINGS, scheduler__max_batch_tokens=17, **more) as engine:
            for _ in range(2):
                assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == expected
            assert engine.stats().prefix_hits > 0


def test_cache_holds_one_key_per_token_and_layer_for_all_heads(checkpoint: Path) -> None:
    spec = DeepseekV2.spec(Checkpoint.open(checkpoint).config)
    [cache, _] = spec.layer_caches
    assert (cache.num_kv_heads, cache.head_dim, cache.value_head_dim) == (1, 32 + 8, 32)  # type: ignore[union-attr]
    with Engine(model=str(checkpoint), **SETTINGS, cache__block_size=16) as engine:
        assert engine.cache_info.num_blocks == 2**20 // (2 * 16 * (32 + 8) * 4)


class InterpretedTriton(TritonAttention):
    """On a CPU, where Triton's interpreter runs the kernels."""

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return super().refuses(spec, evolve(device, type="cuda"))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the kernels are compiled for the GPU")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for rows of padding: NaN is there
def test_triton_backend_gives_the_tokens_of_the_backend_torch_in_chunks_and_replays(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_capture, "GraphCapturer", ReplayByRunning)
    monkeypatch.setattr(start_graphs, "use_graphs", lambda config, *_: config.executor.graphs != "off")
    ReplayByRunning.captured = 0
    params = evolve(GREEDY, max_tokens=5)
    with Engine(model=str(checkpoint), **SETTINGS, executor__graphs="off") as engine:
        expected = [one.token_ids for one in engine.generate(PROMPTS, params)]
    settings: dict[str, Any] = {"executor__graphs": "decode", "scheduler__max_batch_tokens": 17}
    settings |= {"scheduler__max_running": 4, "model__max_len": 128}
    with Engine(model=str(checkpoint), attention=InterpretedTriton, **SETTINGS, **settings) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS, params)] == expected
    assert ReplayByRunning.captured > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_greedy_tokens_on_a_gpu_are_those_of_the_backend_torch(checkpoint: Path, graphs: str) -> None:
    """With graphs, decodes are replayed, and chunks of prompts run in piecewise graphs."""
    settings: dict[str, Any] = {**SETTINGS, "executor__device": "cuda", "model__max_len": 256}
    with Engine(model=str(checkpoint), attention__name="torch", **settings) as engine:
        expected = [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)]
    settings |= {"executor__graphs": graphs, "scheduler__max_batch_tokens": 17, "scheduler__max_running": 4}
    with Engine(model=str(checkpoint), **settings) as engine:
        names = {choice.extension_point: choice.name for choice in engine.parts.choices}
        assert (names["models"], names["attention"]) == (NAME, "triton")
        assert [list(one.token_ids) for one in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    ("device", "settings", "attention"),
    [
        (GPU, {}, "triton"),
        (GPU, {"attention": AttentionConfig(name="triton")}, "triton"),
        (GPU, {"attention": AttentionConfig(name="torch")}, "torch"),
        (evolve(GPU, capability=(7, 5)), {}, "torch"),
        (CPU, {}, "torch"),
    ],
    ids=["GPU", "triton", "torch", "old GPU", "CPU"],
)
def test_auto_serves_the_checkpoint_natively_with_a_backend_that_reads_its_cache(
    checkpoint: Path, device: DeviceInfo, settings: dict[str, Any], attention: str
) -> None:
    config = evolve(EngineConfig(), model=ModelConfig(path=str(checkpoint)), **settings)
    parts = resolve(config, load_plugins(), device, Checkpoint.open(checkpoint).config)
    names = {choice.extension_point: choice.name for choice in parts.choices}
    assert (names["models"], names["attention"]) == (NAME, attention)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"q_lora_rank": 1536}, {}),
        ({}, {"attention": AttentionConfig(name="native")}),
        ({}, {"cache": CacheConfig(dtype="float8_e4m3fn")}),
    ],
    ids=["queries from a latent", "backend without latent keys", "float8 cache"],
)
def test_auto_takes_the_fallback_where_the_native_model_cannot_serve(
    checkpoint: Path, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = evolve(EngineConfig(), model=ModelConfig(path=str(checkpoint)), **settings)
    parts = resolve(config, load_plugins(), CPU, {**Checkpoint.open(checkpoint).config, **changes})
    assert {choice.extension_point: choice.name for choice in parts.choices}["models"] == "transformers"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention__name": "native"}, "it reads no values of 32 numbers with keys of 40"),
        ({"cache__dtype": "float8_e4m3fn"}, "core writes no latent KV cache in float8_e4m3fn; use --kv-dtype float32"),
    ],
    ids=["backend without latent keys", "float8 cache"],
)
def test_what_reads_no_latent_cache_is_refused_by_a_sentence(
    checkpoint: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(PluginError, match=said):
        Engine(model=str(checkpoint), **SETTINGS, **settings)


@pytest.mark.parametrize("input_scale", [0.001, 0.03, 2.0])
def test_keys_and_values_do_not_depend_on_the_stored_scale_of_an_input_that_is_never_quantized(
    checkpoint: Path, tmp_path: Path, input_scale: float
) -> None:
    config = compressed("int-quantized", number("int", "channel"), number("int", "tensor"))
    packer = with_tensors(int8_per_channel, lambda module: {"input_scale": torch.tensor([input_scale])})
    config["config_groups"]["group_0"]["targets"] = ["re:.*kv_b_proj"]
    paths = quantized(checkpoint, tmp_path, packer, config, unquantized=lambda name: not name.endswith("kv_b_proj"))
    methods = (Int8.from_checkpoint(config, None), None)
    ours, expected = (
        ModelBench(DeepseekV2, path, PROMPTS[-1:], quant=method).prompt_logits(0)
        for path, method in zip(paths, methods, strict=True)
    )
    assert float((ours - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_lora_rank": 1536}, "q_lora_rank: null; queries from a latent (DeepSeek-V2) are not computed"),
        ({"q_lora_rank": ...}, "q_lora_rank: null; queries from a latent (DeepSeek-V2) are not computed"),
        ({"topk_method": "group_limited_greedy"}, 'topk_method: "group_limited_greedy"'),
        ({"norm_topk_prob": True}, "norm_topk_prob: true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads"),
        ({"num_experts_per_tok": 9}, "9 experts per token, and a layer has 8"),
        ({"kv_lora_rank": ...}, "'kv_lora_rank'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(checkpoint: Path, changes: dict[str, Any], said: str) -> None:
    config = {**Checkpoint.open(checkpoint).config, **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    refusal = DeepseekV2.refuses(config)
    if refusal is None:
        with pytest.raises(CheckpointError) as caught:
            DeepseekV2.spec(config)
        refusal = str(caught.value)
    assert said in refusal
