"""FLOPs and bytes of modules and steps, against numbers worked out by hand and torch's own counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from engine.core.config import EngineConfig
from engine.core.config.tree import ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.engine import Engine
from engine.core.executors.wire import MessageDecoder, encode
from engine.core.layers import matmul
from engine.core.plugin_host import load_plugins
from engine.core.plugin_host.selection import find_quant
from engine.core.profiling import ModelCost, ModuleCost, Peaks, StepShape, Work, count_unloaded
from engine.core.profiling.count import merged_name
from engine.core.profiling.step_shape import total_pairs, visible_keys, visible_pairs
from engine.core.types import Request, SamplingParams
from engine.plugins.models.gemma3 import Gemma3
from engine.plugins.models.llama import Llama
from engine.plugins.models.qwen3_moe import Qwen3Moe
from engine.testing.checkpoints import make_checkpoint

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GEMMA_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "query_pre_attn_scalar": 256,
}
QWEN_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
H200 = Peaks(bandwidth=4.8e12, flops=989e12, flops8=1979e12)


def count(model: type[Any], config: dict[str, Any], **arguments: Any) -> ModelCost:
    return count_unloaded(model, config, arguments.pop("engine", EngineConfig()), dtype="bfloat16", **arguments)


def module(cost: ModelCost, name: str) -> ModuleCost:
    [found] = [one for one in cost.modules if one.name == name]
    return found


def test_llama_three_layers_equal_a_count_by_hand() -> None:
    cost = count(Llama, LLAMA_8B)
    # Two sequences decode with contexts of 100 and 200 tokens; a chunk of 30 tokens begins at position 10.
    shape = StepShape.of(decodes=[100, 200], chunks=[(10, 30)], sampled=2)
    qkv = module(cost, "model.layers.0.self_attn.q_proj+k_proj+v_proj").work(shape)
    assert qkv == Work(
        flops=2 * 32 * 4096 * 6144,  # 32 tokens; 4096 queries, 1024 keys, 1024 values
        weight_bytes=2 * 4096 * 6144,
        activation_bytes=2 * 32 * (4096 + 6144),
    )
    pairs = 100 + 200 + sum(range(11, 41))
    attention = module(cost, "model.layers.0.self_attn.attention").work(shape)
    assert attention == Work(
        flops=4 * 32 * 128 * pairs,
        kv_read=2 * 8 * 128 * 2 * (100 + 200 + 40),
        kv_written=2 * 8 * 128 * 2 * 32,
        activation_bytes=2 * 32 * (4096 + 1024 + 1024 + 4096),
    )
    gate_up = module(cost, "model.layers.31.mlp.gate_proj+up_proj").work(shape)
    assert gate_up == Work(
        flops=2 * 32 * 4096 * 28672, weight_bytes=2 * 4096 * 28672, activation_bytes=2 * 32 * (4096 + 14336)
    )
    head = module(cost, "lm_head").work(shape)
    assert head == Work(flops=2 * 2 * 4096 * 128256, weight_bytes=2 * 4096 * 128256, activation_bytes=2 * 2 * 4096)


def test_gemma_layers_with_a_window_count_only_what_it_shows() -> None:
    cost = count(Gemma3, GEMMA_4B)
    assert set(cost.windows) == {1024, None}
    shape = StepShape.of(decodes=[3000], chunks=[(1000, 100)], windows=cost.windows)
    sliding = module(cost, "model.layers.0.self_attn.attention").work(shape)
    # Queries 1000 to 1023 see 1001 to 1024 keys, the other 76 see 1024 each.
    chunk = sum(range(1001, 1025)) + 76 * 1024
    assert sliding.flops == 4 * 8 * 256 * (1024 + chunk)
    assert sliding.kv_read == 2 * 4 * 256 * 2 * (1024 + 1100)
    full = module(cost, "model.layers.5.self_attn.attention").work(shape)
    assert full.flops == 4 * 8 * 256 * (3000 + sum(range(1001, 1101)))
    assert full.kv_read == 2 * 4 * 256 * 2 * (3000 + 1100)
    assert full.kv_written == sliding.kv_written == 2 * 4 * 256 * 2 * 101
    head = module(cost, "lm_head").work(shape)  # the embedding's table
    assert head.weight_bytes == 2 * 2560 * 262208
    assert module(cost, "model.embed_tokens").work(shape) == Work(activation_bytes=101 * 2 * 2560 * 2)


def test_qwen_moe_reads_the_distinct_experts_expected() -> None:
    cost = count(Qwen3Moe, QWEN_30B)
    one, many = (module(cost, "model.layers.7.mlp.experts").work(StepShape.of(decodes=[9] * n)) for n in (1, 64))
    expert = 3 * 2048 * 768
    assert one.flops == 2 * 8 * expert
    assert one.weight_bytes == pytest.approx(8 * 2 * expert)
    assert many.flops == 64 * 2 * 8 * expert
    assert many.weight_bytes == pytest.approx(2 * expert * 128 * (1 - (120 / 128) ** 64))  # 125.9 of 128 experts
    router = module(cost, "model.layers.7.mlp.gate").work(StepShape.of(decodes=[9]))
    assert (router.flops, router.weight_bytes) == (2 * 2048 * 128, 2 * 2048 * 128)
    output = module(cost, "model.layers.7.self_attn.o_proj").work(StepShape.of(decodes=[9]))
    assert (output.flops, output.weight_bytes) == (2 * 4096 * 2048, 2 * 4096 * 2048)


def test_fp8_layers_count_their_stored_bytes_and_scales() -> None:
    config = LLAMA_8B | {"quantization_config": FP8}
    plugin = find_quant(EngineConfig(), load_plugins(EngineConfig().plugins), DeviceInfo(type="cpu"), config)
    cost = count(Llama, config, quant=plugin.from_checkpoint(FP8, None))
    shape = StepShape.of(decodes=[50])
    down = module(cost, "model.layers.0.mlp.down_proj").work(shape)
    scales = (4096 // 128) * (14336 // 128)
    assert down.weight_bytes == pytest.approx(4096 * 14336 + 4 * scales, abs=2 * scales)  # of 2 or 4 bytes
    assert down.flops == down.flops8 == 2 * 4096 * 14336
    head = module(cost, "lm_head").work(shape)
    assert (head.flops8, head.weight_bytes) == (0, 2 * 4096 * 128256)
    assert module(cost, "model.layers.0.self_attn.attention").work(shape).flops8 == 0


def test_ranks_hold_their_shards_and_replicas_of_heads() -> None:
    half, whole = count(Llama, LLAMA_8B, ranks=2), count(Llama, LLAMA_8B)
    shape = StepShape.of(decodes=[100] * 3)
    assert half.work(shape).flops == pytest.approx(whole.work(shape).flops / 2)
    assert half.work(shape).kv_read == whole.work(shape).kv_read / 2
    many = count(Llama, LLAMA_8B, ranks=16)  # two ranks hold each of the 8 KV heads
    qkv = module(many, "model.layers.0.self_attn.q_proj+k_proj+v_proj")
    assert qkv.weight_bytes == 2 * 4096 * (256 + 128 + 128)
    assert module(many, "model.layers.0.self_attn.attention").kv_bytes_per_token == 2 * 128 * 2
    assert many.modules == count(Llama, LLAMA_8B, ranks=16, rank=15).modules


def test_expert_parallel_ranks_compute_their_share_of_the_tokens() -> None:
    engine = EngineConfig(executor=ExecutorConfig(tensor_parallel=4, expert_parallel=True))
    experts = module(count(Qwen3Moe, QWEN_30B, ranks=4, engine=engine), "model.layers.0.mlp.experts")
    assert experts.expert_bytes == 32 * 2 * 3 * 2048 * 768
    assert experts.flops_per_row == 2 * 2 * 3 * 2048 * 768  # two of a token's eight experts


def test_a_condensed_cost_is_the_same_in_fewer_parts() -> None:
    cost = count(Gemma3, GEMMA_4B)
    shape = StepShape.of(decodes=[3000, 5], chunks=[(0, 700)], sampled=2, windows=cost.windows)
    small = cost.condensed()
    assert small.work(shape) == cost.work(shape)
    assert len(small.modules) <= 6
    assert small.windows == cost.windows
    assert MessageDecoder[ModelCost](ModelCost).decode(encode(small)) == small


def test_the_floor_of_a_step_is_the_larger_of_bytes_and_flops() -> None:
    reads = Work(flops=1e9, weight_bytes=4.8e9, activation_bytes=1e12)
    assert reads.step_floor(H200) == pytest.approx(1e-3)
    computes = Work(flops=3e12, flops8=1e12, weight_bytes=4.8e6)
    assert computes.step_floor(H200) == pytest.approx(2 / 989 + 1 / 1979)
    assert Work(flops=8, weight_bytes=1, activation_bytes=3).intensity == 2
    assert Work(weight_bytes=2.4e9, activation_bytes=2.4e9).module_floor(H200) == pytest.approx(1e-3)


@pytest.mark.parametrize("window", [None, 1, 7, 24, 100])
def test_visible_pairs_and_keys_equal_a_count_one_by_one(window: int | None) -> None:
    for start, size in [(0, 1), (0, 30), (5, 3), (20, 10), (40, 9)]:
        seen = [
            range(0 if window is None else max(0, last + 1 - window), last + 1) for last in range(start, start + size)
        ]
        assert visible_pairs(start, size, window) == sum(map(len, seen))
        assert visible_keys(start, size, window) == len(set().union(*seen))


@pytest.mark.parametrize("window", [None, 7])
def test_total_pairs_equals_the_sum_over_runs_of_tokens(window: int | None) -> None:
    starts, counts = [0, 5, 0, 20], [4, 3, 0, 10]
    expected = sum(visible_pairs(start, count, window) for start, count in zip(starts, counts, strict=True))
    assert total_pairs(starts, counts, window) == expected
    assert total_pairs([], [], window) == 0


def test_names_of_merged_modules_share_their_beginning() -> None:
    assert merged_name(["a.b.q", "a.b.k"]) == "a.b.q+k"
    assert merged_name(["lm_head"]) == "lm_head"
    assert merged_name(["a.b.q", "a.c.k"]) == "a.b.q+c.k"


def test_gemms_equal_what_torch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "can_pack", lambda weight: False)  # torch does not count oneDNN's packed products
    path = make_checkpoint(tmp_path / "tiny", "qwen3")
    with Engine(model=path, executor__device="cpu", cache__memory="8MiB") as engine:
        cost = engine.cache_info.cost
        assert cost is not None
        engine.add(Request(id="one", prompt=tuple(range(1, 41)), params=SamplingParams(max_tokens=2, ignore_eos=True)))
        counted = []
        for _ in range(2):  # the prompt, then one decode
            with FlopCounterMode(display=False) as counter:
                engine.step()
            flops = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
            counted.append(sum(flops.get(op, 0) for op in ("aten.mm", "aten.addmm")))
    gemms = [one for one in cost.modules if not one.flops_per_pair]
    expected = [StepShape.of(chunks=[(0, 40)]), StepShape.of(decodes=[41])]
    assert counted == [sum(one.work(shape).flops for one in gemms) for shape in expected]
    # By hand: two layers of q, k, v, output 64 x (64 + 32 + 32 + 64) and 3 x 64 x 96; the LM head 64 x 512.
    layers = 2 * 2 * (64 * 192 + 3 * 64 * 96)
    assert counted == [40 * layers + 2 * 64 * 512, layers + 2 * 64 * 512]
