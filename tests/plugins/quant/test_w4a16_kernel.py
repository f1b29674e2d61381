"""One linear layer: packed for a GPU (multiplied in the interpreter without one), shared by ranks, or broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.quant.base import LinearPart, LinearSpec
from engine.core.weights import DummySource, SafetensorsSource, load_weights
from engine.core.weights.checkpoint import Checkpoint
from engine.plugins.quant.awq import Awq
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.testing.ranks import LoneRank

from .packers import Weight

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
}
METHODS = {"gptq": (Gptq, GPTQ | {"sym": False}), "awq": (Awq, AWQ), "compressed": (CompressedTensors, COMPRESSED)}
CPU = DeviceInfo(type="cpu")


def stored(weight: Any, method: Any) -> Any:
    if method == "compressed":
        return weight.compressed(symmetric=False, ordered=False)
    return getattr(weight, method)()


def tensors_of(weights: Any, method: Any) -> Any:
    return {f"{name}.{end}": tensor for name, one in weights.items() for end, tensor in stored(one, method).items()}


@pytest.mark.parametrize(
    ("method", "ordered"),
    [(name, "none") for name in METHODS] + [("gptq", ordered) for ordered in ("equal", "each", "some")],
)
def test_parts_of_one_act_order_are_packed_as_one_matrix(method: Any, ordered: Any) -> None:
    seeds = {"none": (1, 2, 3), "equal": (4, 4, 4), "each": (1, 2, 3), "some": (4, 4, 5)}[ordered]
    sizes = {"q": 64, "k": 32, "v": 32}
    weights = {
        name: Weight(size, 96, symmetric=False, ordered=ordered != "none", seed=seed)
        for (name, size), seed in zip(sizes.items(), seeds, strict=True)
    }
    if ordered == "equal":
        for weight in weights.values():
            weight.group_of = weights["q"].group_of
    cls, config = METHODS[method]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = tuple(LinearPart(name=name, out_features=size) for name, size in sizes.items())
    spec = LinearSpec(parts=parts, in_features=96, bias=True, dtype="float16", device=device)
    kernel = cls.from_checkpoint(config, None).linear(spec)
    assert isinstance(kernel, W4A16Kernel)
    loaded = {name: tensor.to(device) for name, tensor in tensors_of(weights, method).items()}
    assert set(kernel.tensors()) >= set(loaded)
    packed = kernel.pack_weights(loaded)
    matrices = sum(name.startswith("packed") for name in packed)
    assert matrices == {"none": 1, "equal": 1, "each": 3, "some": 2}[ordered]
    plain = torch.cat([weight.plain for weight in weights.values()]).to(device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 96, generator=generator).half().to(device)
    bias = torch.randn(128, generator=generator).half().to(device)
    expected = x.float() @ plain.T + bias.float()
    torch.testing.assert_close(kernel.apply(x, packed, bias).float(), expected, rtol=2e-3, atol=2e-3)
    gate, up = expected.chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernel.apply_gated(x, packed, bias).float(), gated, rtol=5e-3, atol=5e-3)
    if device == "cpu":
        assert kernel.prepare(loaded).keys() == {"weight"}


def test_g_idx_of_consecutive_groups_is_dropped() -> None:
    weight = Weight(16, 64)
    kernel = Gptq.from_checkpoint(GPTQ, None).linear(one_part("a", 16, 64))
    assert kernel.pack_weights({f"a.{end}": tensor for end, tensor in weight.gptq().items()}).keys() == {
        "packed0",
        "scales0",
    }


def one_part(name: Any, outputs: Any, inputs: Any, dtype: str = "float16", **more: Any) -> Any:
    return LinearSpec(
        parts=(LinearPart(name=name, out_features=outputs),), in_features=inputs, bias=False, dtype=dtype, **more
    )


def test_apply_multiplies_by_the_weights_it_is_given() -> None:
    """Whatever was given to the same kernel before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = Gptq.from_checkpoint(GPTQ, None).linear(one_part("a", 16, 64, device=device))
    weights = [Weight(16, 64, seed=seed) for seed in (1, 2)]
    packed = [
        kernel.pack_weights({f"a.{end}": tensor.to(device) for end, tensor in weight.gptq().items()})
        for weight in weights
    ]
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).half()
    for number in (0, 0, 1, 0):
        y = kernel.apply(x.to(device), packed[number], None).float().cpu()
        torch.testing.assert_close(y, x.float() @ weights[number].plain.T, rtol=2e-3, atol=2e-3)


def test_symmetric_zero_points_are_not_kept() -> None:
    scales = {}
    for symmetric in (True, False):
        weight = Weight(16, 128, symmetric=symmetric)
        kernel = Gptq.from_checkpoint(GPTQ | {"sym": False}, None).linear(one_part("a", 16, 128))
        scales[symmetric] = kernel.pack_weights({f"a.{end}": tensor for end, tensor in weight.gptq().items()})[
            "scales0"
        ]
    assert scales[True].numel() * 2 == scales[False].numel()


class Network:
    """A column-parallel layer of two parts and a row-parallel one."""

    def __init__(self, quant: Any, *, rank: int = 0, ranks: int = 1) -> None:
        self.layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(rank, ranks), quant=quant)
        self.up = self.layers.linear([("a", 64), ("b", 64)], 64, parallel="column")
        self.down = self.layers.linear([("c", 32)], 128, parallel="row")

    def load(self, source: Any) -> Any:
        load_weights(self.layers, source)
        return self


def network_tensors(method: Any, **options: Any) -> Any:
    shapes = {"a": (64, 64), "b": (64, 64), "c": (32, 128)}
    weights = {name: Weight(*shape, symmetric=False, seed=1, **options) for name, shape in shapes.items()}
    return weights, tensors_of(weights, method)


def source_of(directory: Any, tensors: Any) -> Any:
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return SafetensorsSource(Checkpoint.open(directory))


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_would_cut_groups_are_refused(tmp_path: Path, method: Any) -> None:
    """Before anything is loaded."""
    cls, config = METHODS[method]
    with pytest.raises(CheckpointError, match="8 ranks share the 128 inputs of c, 16 each, which cuts groups of 32"):
        Network(cls.from_checkpoint(config, None), ranks=8)


@pytest.mark.parametrize(
    ("parallel", "outputs", "inputs", "said"),
    [
        ("row", 32, 224, "2 ranks share the 224 inputs of c, 112 each, which cuts groups of 64"),
        ("column", 40, 64, "2 ranks share the 40 outputs of c, 20 each, which cuts words of 8"),
        ("row", 32, 72, "2 ranks share the 72 inputs of c, 36 each, which cuts words of 8"),
    ],
)
def test_shards_that_cut_words_or_groups_are_refused(parallel: str, outputs: int, inputs: int, said: str) -> None:
    """What the files store would divide: 224 inputs are 4 groups, the last one short."""
    quant = Gptq.from_checkpoint(GPTQ | {"group_size": -1 if inputs == 72 else 64}, None)
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(0, 2), quant=quant)
    with pytest.raises(CheckpointError, match=said):
        layers.linear([("c", outputs)], inputs, parallel=parallel)


ORDERED = {
    "gptq": (Gptq, GPTQ | {"sym": False, "desc_act": True}),
    "compressed": (
        CompressedTensors,
        COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | {"actorder": "group"}}}},
    ),
}


@pytest.mark.parametrize("method", ORDERED)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_act_order_sharded_along_inputs_equals_one_rank(method: Any, symmetric: bool, ranks: int) -> None:
    """Each rank has inputs of all groups, more of some than of others."""
    weight = Weight(48, 256, symmetric=symmetric, ordered=True, seed=3)
    tensors = weight.gptq() if method == "gptq" else weight.compressed(symmetric=False, ordered=True)
    cls, config = ORDERED[method]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).half().to(device)
    total, total_plain = torch.zeros(5, 48, device=device), torch.zeros(5, 48)
    for rank in range(ranks):
        spec = one_part("a", 48, 256, parallel="row", ranks=ranks, device=device)
        kernel = cls.from_checkpoint(config, None).linear(spec)
        specs = kernel.tensors()
        loaded = {}
        for end, tensor in tensors.items():
            dim = specs[f"a.{end}"].shard_dim
            loaded[f"a.{end}"] = (tensor if dim is None else tensor.chunk(ranks, dim)[rank].contiguous()).to(device)
        part = x.chunk(ranks, 1)[rank]
        packed = kernel.pack_weights(loaded)
        assert len(packed["order0"]) > 256 // ranks, "some groups are filled up"
        total += kernel.apply(part, packed, None).float()
        total_plain += part.float().cpu() @ kernel.dequantize_weights(loaded)["weight"].to_dense().float().cpu().T
    expected = x.float().cpu() @ weight.plain.T
    torch.testing.assert_close(total.cpu(), expected, rtol=3e-3, atol=6e-3)
    torch.testing.assert_close(total_plain, expected, rtol=3e-3, atol=6e-3)


def test_act_order_that_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    _, tensors = network_tensors("gptq", ordered=True)
    unsaid = Gptq.from_checkpoint(GPTQ | {"sym": False}, None)
    with pytest.raises(CheckpointError, match=r"c\.g_idx has act-order, which .* does not say .* 2 ranks"):
        Network(unsaid, ranks=2).load(source_of(tmp_path, tensors))
    assert Network(unsaid).load(source_of(tmp_path, tensors)).layers.nbytes
    cls, config = ORDERED["gptq"]
    lacking = {name: tensor for name, tensor in tensors.items() if name != "c.g_idx"}
    with pytest.raises(CheckpointError, match=r"lacks c\.g_idx.*act-order.* 2 ranks"):
        Network(cls.from_checkpoint(config, None), ranks=2).load(source_of(tmp_path, lacking))
    beyond = tensors | {"c.g_idx": tensors["c.g_idx"] + 3}
    with pytest.raises(CheckpointError, match=r"c\.g_idx has groups \d to \d; expected 0 to 3"):
        Network(cls.from_checkpoint(config, None), ranks=2).load(source_of(tmp_path, beyond))


def test_dummy_weights_give_finite_results() -> None:
    for cls, config in METHODS.values():
        network = Network(cls.from_checkpoint(config, None)).load(DummySource())
        assert torch.isfinite(network.up(torch.ones(1, 64))).all()


BROKEN = {
    "short weights": ("gptq", {"c.qweight": lambda t: t[:-1]}, r"c\.qweight in .* has shape \[15, 32\]; .*\[16, 32\]"),
    "wide weights": ("awq", {"c.qweight": lambda t: t.T}, r"c\.qweight in .* has shape \[4, 128\]; .*\[128, 4\]"),
    "few scales": ("gptq", {"c.scales": lambda t: t[:2]}, r"c\.scales in .* has shape \[2, 32\]; .*\[4, 32\]"),
    "dequantized zeros": (
        "gptq",
        {"c.qzeros": lambda t: t.repeat(1, 8)},
        r"c\.qzeros in .* has shape \[4, 32\]; .*\[4, 4\]",
    ),
    "float weights": ("gptq", {"c.qweight": lambda t: t.float()}, r"c\.qweight in .* is of type float32; .* int32"),
    "no zeros": ("awq", {"c.qzeros": None}, r"lacks 1 tensor\(s\) .*c\.qzeros"),
    "short order": ("gptq", {"c.g_idx": lambda t: t[:-1]}, r"c\.g_idx has shape \[127\]; the model expects \[128\]"),
    "wrong order": ("gptq", {"c.g_idx": lambda t: t * 0}, r"c\.g_idx must assign 32 inputs to each of 4 groups"),
    "far order": ("gptq", {"c.g_idx": lambda t: t + 4}, r"c\.g_idx must assign 32 .* has groups 4 to 7"),
    "infinite scales": ("gptq", {"c.scales": lambda t: t / 0}, r"c\.scales has scales that are not finite"),
    "NaN scales": ("awq", {"c.scales": lambda t: t * float("nan")}, r"c\.scales has scales that are not finite"),
    "other shape": (
        "compressed",
        {"c.weight_shape": lambda t: t + 1},
        r"c\.weight_shape says that the weight is \[33, 129\]; the model expects \[32, 128\]",
    ),
    "transposed": (
        "compressed",
        {"c.weight_packed": lambda t: t.T},
        r"c\.weight_packed in .* has shape \[16, 32\]; .*\[32, 16\]",
    ),
    "no zero points": ("compressed", {"c.weight_zero_point": None}, r"lacks 1 tensor\(s\) .*c\.weight_zero_point"),
    "zero points dequantized": (
        "compressed",
        {"c.weight_zero_point": lambda t: t.repeat(8, 1)},
        r"c\.weight_zero_point in .* has shape \[32, 4\]; the quantization method expects \[4, 4\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_named_with_what_was_expected_and_found(tmp_path: Path, case: Any) -> None:
    method, changes, message = BROKEN[case]
    _, tensors = network_tensors(method)
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name]).contiguous()
    cls, config = METHODS[method]
    with pytest.raises(CheckpointError, match=message):
        Network(cls.from_checkpoint(config, None)).load(source_of(tmp_path, tensors))


def test_empty_g_idx_means_none(tmp_path: Path) -> None:
    weights, tensors = network_tensors("gptq")
    tensors |= {f"{name}.g_idx": torch.zeros(0, dtype=torch.int32) for name in "abc"}
    network = Network(Gptq.from_checkpoint(GPTQ | {"sym": False}, None)).load(source_of(tmp_path, tensors))
    x = torch.ones(1, 128)
    torch.testing.assert_close(network.down(x), x @ weights["c"].plain.T, rtol=1e-4, atol=1e-4)


REFUSED = {
    "gptq of another method": (Gptq, AWQ, "quant_method is 'awq'"),
    "gptq, 3 bits": (Gptq, GPTQ | {"bits": 3}, "3 bits; use a checkpoint with 4 or 8"),
    "gptq, marlin": (Gptq, GPTQ | {"checkpoint_format": "marlin"}, "'marlin'; this reads gptq and gptq_v2"),
    "gptq, group size": (Gptq, GPTQ | {"group_size": 0}, "group_size is 0"),
    "gptq, dynamic width": (Gptq, GPTQ | {"dynamic": {"+:a": {"bits": 2}}}, r"dynamic \+:a: the weights have 2 bits"),
    "gptq, dynamic pattern": (Gptq, GPTQ | {"dynamic": {"-:*a": {}}}, r"'-:\*a' is no regular expression"),
    "awq of another method": (Awq, GPTQ, "quant_method is 'gptq'"),
    "awq, gemv": (Awq, AWQ | {"version": "GEMV"}, "awq version is 'gemv'"),
    "awq, 8 bits": (Awq, AWQ | {"bits": 8}, "8 bits; awq has 4"),
    "compressed of another method": (CompressedTensors, GPTQ, "quant_method is 'gptq'"),
    "compressed, format": (CompressedTensors, COMPRESSED | {"format": "int-quantized"}, "format is 'int-quantized'"),
    "compressed, width": (
        CompressedTensors,
        COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | {"num_bits": 3}}}},
        "group_0.* is not supported: use weights of 4 or 8 bits",
    ),
    "compressed, activations": (
        CompressedTensors,
        COMPRESSED | {"config_groups": {"group_0": GROUP | {"input_activations": {"num_bits": 8}}}},
        "quantizes activations too",
    ),
    "nothing": (CompressedTensors, COMPRESSED | {"config_groups": {}}, "no config_groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused_with_a_sentence(case: Any) -> None:
    cls, config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        cls.from_checkpoint(config, None)
    assert cls.refuses(config, CPU)


@pytest.mark.parametrize("method", METHODS)
def test_supported_configs_are_not_refused(method: Any) -> None:
    cls, config = METHODS[method]
    assert cls.refuses(config, CPU) is None
    assert "not quantized" in (cls.refuses(None, CPU) or "")


@pytest.mark.parametrize("group_size", [16, 48, 100])
def test_odd_groups_are_refused(group_size: int) -> None:
    method = Gptq.from_checkpoint(GPTQ | {"group_size": group_size}, None)
    with pytest.raises(CheckpointError, match=f"groups of {group_size} inputs; use .* a multiple of 32"):
        method.linear(one_part("a", 32, 4800))


def test_awq_needs_whole_words() -> None:
    kernel = Awq.from_checkpoint(AWQ, None).linear(one_part("a", 30, 64))
    with pytest.raises(CheckpointError, match="a has 30 outputs; awq packs 8 in a word"):
        kernel.tensors()


def test_parts_of_different_schemes_are_refused() -> None:
    method = Gptq.from_checkpoint(GPTQ | {"dynamic": {"b": {"bits": 8}}}, None)
    parts = tuple(LinearPart(name=name, out_features=32) for name in "ab")
    spec = LinearSpec(parts=parts, in_features=32, bias=False, dtype="float16")
    with pytest.raises(CheckpointError, match=r"a as gptq of 4 bits.* but b as gptq of 8 bits"):
        method.linear(spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "group_size"), [("group", 32), ("channel", None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_reads_as_compressed_tensors_does(
    bits: int, strategy: str, group_size: int | None, symmetric: bool
) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    groups = 96 // (group_size or 96)
    low = -(2 ** (bits - 1))
    state = {
        "weight": weight,
        "weight_scale": weight.view(48, groups, -1).abs().amax(-1) / (2 ** (bits - 1)),
        "weight_zero_point": torch.randint(low, -low, (48, groups), generator=generator).to(torch.int8)
        if not symmetric
        else torch.zeros(48, groups, dtype=torch.int8),
    }
    written = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(written, scheme)["weight"]
    config = COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": args}}}
    kernel = CompressedTensors.from_checkpoint(config, None).linear(one_part("a", 48, 96, "float32"))
    assert set(kernel.tensors()) >= {f"a.{end}" for end in written}
    read = kernel.reader.read(
        kernel.spec.parts[0], kernel.spec, {f"a.{end}": tensor for end, tensor in written.items()}
    ).dequantize(kernel.reader.scheme)
    torch.testing.assert_close(read, expected, rtol=1e-6, atol=1e-6)
