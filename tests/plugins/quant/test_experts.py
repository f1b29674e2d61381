"""Quantized experts: checkpoints of each format against their dequantized twins, and kernels against each other."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.errors import CheckpointError
from engine.core.layers import FusedExperts, PlainKernel
from engine.core.layers.expert_tensors import ExpertTensors
from engine.core.quant import ExpertsBias, ExpertsSpec, QuantMethod, Routing
from engine.ops.experts.weights import WeightFormat
from engine.plugins.models.gpt_oss import GptOss
from engine.plugins.models.qwen3_moe import Qwen3Moe
from engine.plugins.quant.awq import Awq, AwqReader
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.experts_by_linears import ExpertsByLinears
from engine.plugins.quant.fp8 import Fp8, Fp8Options
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.int8 import Int8
from engine.plugins.quant.mxfp4 import Mxfp4, Mxfp4OnCpu, stored_tensors
from engine.plugins.quant.none import Unquantized
from engine.plugins.quant.packed_experts import PackedExperts, eight_bit_experts, four_bit_experts
from engine.plugins.quant.w4a16 import GroupScheme
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w8_cpu import DequantizeAtLoadKernel
from engine.plugins.quant.w8_kernel import NONE, TOKEN, W8Format
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks

from .packers import Weight, quantize_checkpoint, quantize_experts_to_mxfp4
from .w8_packers import compressed, fp8_blocks, fp8_per_channel, number, quantized

SIZES = {
    "hidden_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "initializer_range": 0.08,
}
PROMPT = [(7 * i + i * i) % 500 for i in range(24)]
GROUPS = {"bits": 4, "group_size": 32}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
EIGHT_BITS: dict[str, tuple[Any, Any, type[QuantMethod[Any]]]] = {
    "fp8 channels": (
        fp8_per_channel,
        compressed("float-quantized", number("float", "channel"), number("float", "token", dynamic=True)),
        Fp8,
    ),
    "fp8 blocks": (
        fp8_blocks("weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        Fp8,
    ),
}
FOUR_BITS: dict[str, tuple[Any, type[QuantMethod[Any]]]] = {
    "gptq": ({"quant_method": "gptq", "sym": False, **GROUPS}, Gptq),
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True, **GROUPS}, Awq),
    "compressed-tensors": (compressed("pack-quantized", PACKED, None), CompressedTensors),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "qwen3_moe", **SIZES)


def logits(
    path: Path,
    method: type[QuantMethod[Any]] = Unquantized,
    options: Any = None,
    model: Any = Qwen3Moe,
    **settings: Any,
) -> Any:
    checkpoint = json.loads((path / "config.json").read_text()).get("quantization_config")
    quant = method.from_checkpoint(checkpoint, options)
    return ModelBench(model, path, [PROMPT], quant=quant, **settings).prompt_logits(0)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def checkpoint_of(case: str, plain: Path, directory: Path) -> tuple[Path, Path, type[QuantMethod[Any]]]:
    """A quantized checkpoint, its dequantized twin, and the method that reads it."""
    if case in EIGHT_BITS:
        packer, config, method = EIGHT_BITS[case]
        return (*quantized(plain, directory, packer, config), method)
    config, method = FOUR_BITS[case]

    def make(module: Any, shape: Any) -> Any:
        weight = Weight(*shape, symmetric=False, seed=sum(module.encode()))
        weight.scales = (weight.scales * 0.3).half()
        if method is CompressedTensors:
            return weight.compressed(symmetric=False, ordered=False), weight.plain
        return getattr(weight, config["quant_method"])(), weight.plain

    twin = make_checkpoint(directory / "twin", "qwen3_moe", **SIZES)
    quantize_checkpoint(twin, directory / "quantized", config, make)
    return directory / "quantized", twin, method


@pytest.mark.parametrize("case", [*EIGHT_BITS, *FOUR_BITS])
def test_checkpoints_compute_what_their_twins_do(case: str, plain: Path, tmp_path: Path) -> None:
    path, twin, method = checkpoint_of(case, plain, tmp_path)
    wanted = logits(twin)
    assert difference(logits(path, method), wanted) < 2e-5
    for by_expert in (False, True):
        shared = run_ranks(2, lambda group: logits(path, method, group=group, expert_parallel=by_expert))  # noqa: B023
        assert difference(shared[0], wanted) < 2e-5


def test_stacked_block_fp8_computes_what_a_module_per_expert_does(plain: Path, tmp_path: Path) -> None:
    path, _, method = checkpoint_of("fp8 blocks", plain, tmp_path)
    wanted = logits(path, method)
    tensors = load_file(path / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):  # type: ignore[call-overload]
        name = f"model.layers.{layer}.mlp.experts"
        for end, stacked in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            found = [[tensors.pop(f"{name}.{e}.{one}_proj.{end}") for one in ("gate", "up", "down")] for e in range(4)]
            gates = [torch.cat([gate.view(torch.uint8), up.view(torch.uint8)]) for gate, up, _ in found]
            dtype = found[0][0].dtype
            tensors[f"{name}.gate_up_proj{stacked}"] = torch.stack(gates).view(dtype)
            tensors[f"{name}.down_proj{stacked}"] = torch.stack([one[2].view(torch.uint8) for one in found]).view(dtype)
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(logits(path, method), wanted)
    shared = run_ranks(2, lambda group: logits(path, method, group=group))
    assert difference(shared[0], wanted) < 2e-5


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [(Fp8, Fp8Options(), 0.12), (Fp8, Fp8Options(granularity="block"), 0.12), (Int8, None, 0.03)],
)
def test_experts_are_quantized_while_loading(
    method: Any, options: Any, error: float, plain: Path, tmp_path: Path
) -> None:
    wanted, found = logits(plain), logits(plain, method, options)
    assert 1e-4 < difference(found, wanted) < error
    stacked = make_checkpoint(tmp_path, "qwen3_moe", stacked=True, **SIZES)
    assert torch.equal(logits(stacked, method, options), found)


def test_experts_quantized_in_part_are_refused(plain: Path, tmp_path: Path) -> None:
    path, _, method = checkpoint_of("fp8 blocks", plain, tmp_path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["mlp.experts.2.up_proj"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj as .* but .*experts\.2\.up_proj as unquantized"):
        logits(path, method)


def test_quantized_experts_and_a_method_that_leaves_them_alone_are_refused(plain: Path, tmp_path: Path) -> None:
    path, _, _ = checkpoint_of("awq", plain, tmp_path)

    class Alone(Awq):
        def experts(self, spec: ExpertsSpec) -> None:
            return None

    with pytest.raises(CheckpointError, match=r"leaves the experts .* unquantized, and the checkpoint has no .*weight"):
        logits(path, Alone)


SPEC = ExpertsSpec(name="experts", num_experts=4, top_k=2, hidden_size=128, intermediate_size=192, dtype="float32")
"""192: no whole number of blocks of 128, of which two projections are merged."""
ROUTING = [[0, 2], [2, 0], [2, 3], [3, 2], [-1, 2]]


def eight_bit_tensors(spec: ExpertsSpec, packer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for expert in range(spec.num_experts):
        for linear in spec.linears(expert):
            for part in linear.parts:
                weight = torch.randn(part.out_features, linear.in_features) * linear.in_features**-0.5
                found |= {f"{part.name}.{end}": tensor for end, tensor in packer(part.name, weight)[0].items()}
    return found


def channel_case() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    form = W8Format(dtype="float8_e4m3fn", granularity="channel", activations=TOKEN, scale_names=("weight_scale",))
    make = lambda one: DequantizeAtLoadKernel(one, form)  # noqa: E731
    return eight_bit_experts(SPEC, make), ExpertsByLinears(SPEC, make), eight_bit_tensors(SPEC, fp8_per_channel)


def block_case() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    form = W8Format(dtype="float8_e4m3fn", granularity="block", activations=NONE, scale_names=("weight_scale",))
    spec = SPEC.__class__(**{**{f: getattr(SPEC, f) for f in ("name", "num_experts", "top_k", "hidden_size", "dtype")},
                             "intermediate_size": 256})  # fmt: skip
    make = lambda one: DequantizeAtLoadKernel(one, form)  # noqa: E731
    return (
        eight_bit_experts(spec, make),
        ExpertsByLinears(spec, make),
        eight_bit_tensors(spec, fp8_blocks("weight_scale")),
    )


def int4_case() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    reader = AwqReader(GroupScheme(bits=4, group_size=64))
    tensors = {}
    for expert in range(SPEC.num_experts):
        for linear in SPEC.linears(expert):
            for part in linear.parts:
                weight = Weight(
                    part.out_features, linear.in_features, group_size=64, symmetric=False, seed=sum(part.name.encode())
                )
                tensors |= {f"{part.name}.{end}": tensor for end, tensor in weight.awq().items()}
    on_cpu = ExpertsByLinears(SPEC, lambda one: W4A16Kernel(one, reader, WeightOnlyMatmuls()))
    return four_bit_experts(SPEC, reader), on_cpu, tensors


# Rows of pairs of other ranks are quantized too, whatever their memory held; the interpreter's NumPy warns of infinity.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.interpreter
@pytest.mark.parametrize("case", [channel_case, block_case, int4_case])
def test_packed_experts_compute_what_the_linear_kernels_do(case: Any) -> None:
    torch.manual_seed(0)
    packed, on_cpu, tensors = case()
    assert packed.tensors() == on_cpu.tensors()
    x, experts = torch.randn(5, 128), torch.tensor(ROUTING, dtype=torch.int32)
    routing = Routing(experts, torch.rand(5, 2) + 0.5)
    bias = ExpertsBias(torch.randn(4, 2 * packed.spec.intermediate_size), torch.randn(4, 128))
    wanted = on_cpu.apply(x, routing, on_cpu.prepare(tensors), bias)
    weights = packed.prepare(tensors)
    apart = [
        packed.apply(x[row, None], Routing(experts[row, None], routing.weights[row, None]), weights, bias)
        for row in range(5)
    ]
    assert difference(torch.cat(apart), wanted) < 1e-5
    together = packed.apply(x, routing, weights, bias)
    assert difference(together, wanted) < (0.1 if packed.op.quantizes(5) else 1e-5)  # float8: 3 bits of fraction


def test_activations_of_more_than_one_token_are_quantized() -> None:
    spec = ExpertsSpec(name="experts", num_experts=4, top_k=2, hidden_size=128, intermediate_size=128, dtype="bfloat16")
    op = FusedExperts(spec, WeightFormat(kind="channel"), torch.int8)
    assert [op.quantizes(tokens) for tokens in (1, 2, 65)] == [False, True, True]
    assert 1 not in op.row_classes


@pytest.mark.interpreter
def test_quantized_activations_cost_little_precision() -> None:
    torch.manual_seed(0)
    form = W8Format(dtype="int8", granularity="channel", activations=TOKEN)
    spec = ExpertsSpec(name="experts", num_experts=1, top_k=1, hidden_size=128, intermediate_size=64, dtype="float32")
    packed = eight_bit_experts(spec, lambda one: DequantizeAtLoadKernel(one, form))
    weights = packed.prepare(
        {name: torch.randn(one.shape) * one.shape[-1] ** -0.5 for name, one in packed.tensors().items()}
    )
    x, routing = torch.randn(9, 128), Routing(torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1))

    def compute(rows: slice) -> torch.Tensor:
        return packed.apply(x[rows], Routing(routing.experts[rows], routing.weights[rows]), weights, None)

    apart = torch.cat([compute(slice(row, row + 1)) for row in range(9)])
    assert packed.op.quantizes(9)
    assert 1e-4 < difference(compute(slice(None)), apart) < 0.02


GPT_OSS = ExpertsSpec(
    name="experts",
    num_experts=3,
    top_k=2,
    hidden_size=64,
    intermediate_size=96,
    dtype="float32",
    activation="swiglu_oai",
    stacked=True,
    interleaved=True,
    transposed=True,
)


def mxfp4_tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random tensors as gpt-oss stores them, and the weights they mean, number by number: gates before ups."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    draw = torch.Generator().manual_seed(0)
    tensors, meant = {}, {}
    for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        blocks = torch.randint(0, 256, (3, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(120, 126, (3, outputs, inputs // 32), dtype=torch.uint8, generator=draw)
        weight = torch.zeros(3, outputs, inputs)
        for expert, row, group in product(range(3), range(outputs), range(inputs // 32)):
            for place, byte in enumerate(blocks[expert, row, group].tolist()):
                for half, nibble in enumerate((byte & 15, byte >> 4)):
                    sign = -1.0 if nibble & 8 else 1.0
                    power = 2.0 ** (int(scales[expert, row, group]) - 127)
                    weight[expert, row, group * 32 + 2 * place + half] = sign * values[nibble & 7] * power
        if name == "gate_up_proj":
            weight = torch.cat((weight[:, 0::2], weight[:, 1::2]), 1)
        tensors |= {f"experts.{name}_blocks": blocks, f"experts.{name}_scales": scales}
        meant[name.removesuffix("_proj")] = weight
    return tensors, meant


@pytest.mark.interpreter
def test_mxfp4_experts_mean_what_the_specification_says() -> None:
    tensors, meant = mxfp4_tensors()
    method = Mxfp4.from_checkpoint({"quant_method": "mxfp4"}, None)
    on_cpu = method.experts(GPT_OSS)
    assert isinstance(on_cpu, Mxfp4OnCpu)
    assert {name: one.shape for name, one in on_cpu.tensors().items()} == {
        name: tuple(one.shape) for name, one in tensors.items()
    }
    weights = on_cpu.prepare(tensors)
    assert all(torch.equal(weights[name], weight) for name, weight in meant.items())
    packed = packed_mxfp4()
    x, routing = torch.randn(4, 64), Routing(torch.tensor([[0, 2], [2, 0], [2, 1], [1, 2]]).int(), torch.rand(4, 2))
    found = packed.apply(x, routing, packed.prepare(tensors), None)
    assert difference(found, on_cpu.apply(x, routing, weights, None)) < 1e-5


def test_gpt_oss_in_mxfp4_computes_what_its_dequantized_twin_does(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8}
    twin, path = make_checkpoint(tmp_path / "twin", "gpt_oss", **sizes), tmp_path / "quantized"
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantize_experts_to_mxfp4(twin, path, {"quant_method": "mxfp4", "modules_to_not_convert": modules})
    wanted = logits(twin, model=GptOss)
    assert difference(logits(path, Mxfp4, model=GptOss), wanted) < 1e-5
    for by_expert in (False, True):
        shared = run_ranks(2, lambda group: logits(path, Mxfp4, model=GptOss, group=group, expert_parallel=by_expert))  # noqa: B023
        assert difference(shared[0], wanted) < 1e-5


def packed_mxfp4() -> PackedExperts:
    """The kernel of a GPU."""
    from engine.plugins.quant.mxfp4 import packed_experts

    return packed_experts(GPT_OSS)


def test_mxfp4_shares_groups_whole_or_refuses() -> None:
    def spec(**settings: Any) -> ExpertsSpec:
        return ExpertsSpec(
            name="experts", num_experts=4, top_k=2, hidden_size=64, intermediate_size=96, dtype="float32",
            stacked=True, interleaved=True, **settings,
        )  # fmt: skip

    found = ExpertTensors(spec(ranks=3), stored_tensors).specs()
    assert found["experts.down_proj_blocks"].shard_dim == 2
    assert found["experts.gate_up_proj_blocks"].shard_parts == 1
    with pytest.raises(CheckpointError, match="groups of 32; use fewer ranks, or --expert-parallel"):
        ExpertTensors(spec(ranks=2), stored_tensors).specs()
    whole = ExpertTensors(spec(ranks=2, parallel="expert"), lambda one: PlainKernel(one).tensors()).specs()
    assert {one.shard_dim for one in whole.values()} == {0}
