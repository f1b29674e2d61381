"""Linear layers, their kernels, and the factory that chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import LayerFactory, Linear, gated_activation, silu_and_mul
from engine.core.layers.linear import PlainKernel
from engine.core.quant.base import (
    ACTIVATIONS,
    FusedInputQuantization,
    LinearKernel,
    QuantizedActivation,
    QuantMethod,
    TensorSpec,
)
from engine.testing.ranks import LoneRank


class Doubled(LinearKernel):
    """Reads one tensor for all parts and multiplies by twice its sum."""

    def tensors(self) -> Any:
        return {"only.values": TensorSpec(shape=(-1,), dtypes=("int8",))}

    def prepare(self, loaded: Any) -> Any:
        return {"factor": loaded["only.values"].sum() * 2}

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return x * weights["factor"] + (0 if bias is None else bias)


class Chosen(QuantMethod):
    """Takes only the layers named special."""

    api = "1"

    def __init__(self) -> None:
        self.asked = []

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> Any:
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: Any) -> Any:
        return cls()

    def linear(self, spec: Any) -> Any:
        self.asked.append(spec)
        return Doubled() if spec.parts[0].name == "special" else None


def make(**changes: Any) -> Any:
    return LayerFactory(**{"dtype": "float32", "device": "cpu", **changes})


def test_factory_asks_the_quantization_method_for_each_linear() -> None:
    quant = Chosen()
    layers = make(quant=quant)
    special = layers.linear([("special", 3)], 3, bias=True)
    plain = layers.linear([("a", 3), ("b", 2)], 3, parallel="column")
    assert [[part.name for part in spec.parts] for spec in quant.asked] == [["special"], ["a", "b"]]
    assert quant.asked[1].parallel == "column"
    assert quant.asked[1].out_features == 5
    assert isinstance(plain.kernel, PlainKernel)
    assert set(special.tensors()) == {"only.values", "special.bias"}
    special.fill({"only.values": torch.tensor([1, 2]), "special.bias": torch.ones(3)})
    assert torch.equal(special(torch.ones(1, 3)), torch.full((1, 3), 7.0))


@pytest.mark.parametrize("parallel", ["none", "column", "row"])
def test_plain_linear_reads_weights_and_biases_of_its_parts(parallel: Any) -> None:
    linear = make().linear([("a", 4), ("b", 2)], 6, bias=True, parallel=parallel)
    shapes = {name: spec.shape for name, spec in linear.tensors().items()}
    assert shapes == {"a.weight": (4, 6), "b.weight": (2, 6), "a.bias": (4,), "b.bias": (2,)}
    shards = {name: spec.shard_dim for name, spec in linear.tensors().items()}
    weight, bias = {"none": (None, None), "column": (0, 0), "row": (1, None)}[parallel]
    assert shards == {"a.weight": weight, "b.weight": weight, "a.bias": bias, "b.bias": bias}


def test_single_weight_is_not_copied() -> None:
    linear = make().linear([("a", 4)], 6)
    weight = torch.randn(4, 6, device="meta")  # weights on a CPU are packed, see test_matmul.py
    assert linear.kernel.prepare({"a.weight": weight})["weight"] is weight


def test_gated_linear_activates_unless_its_kernel_does() -> None:
    class Both(Doubled):
        def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
            return x + 100

    x = torch.randn(2, 4)
    plain = make().linear([("gate", 3), ("up", 3)], 4, parallel="column", gated=True)
    assert plain.spec.gated
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    plain.fill({"gate.weight": gate, "up.weight": up})
    torch.testing.assert_close(plain.gated(x), torch.nn.functional.silu(x @ gate.T) * (x @ up.T))
    weights = {"factor": torch.tensor(0.5)}
    torch.testing.assert_close(Doubled().apply_gated(x, weights, None), silu_and_mul(0.5 * x))
    seen = []
    default = Linear(plain.spec, Doubled(), activate=lambda y: seen.append(y) or y)
    default.weights = weights
    assert torch.equal(default.gated(x), 0.5 * x)
    assert len(seen) == 1
    assert torch.equal(Linear(plain.spec, Both()).gated(x), x + 100)
    summed = Linear(plain.spec, Both(), reduce=lambda y: 2 * y)  # activated after the reduction
    summed.weights = weights
    torch.testing.assert_close(summed.gated(x), silu_and_mul(x))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "swiglu_oai"])
def test_gated_kernel_is_called_only_for_activations_that_it_computes(activation: Any) -> None:
    class Both(Doubled):
        def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
            return x + 100

    class Every(Both):
        activations = ACTIVATIONS

    x = torch.randn(2, 8)
    spec = make().linear([("gate", 3), ("up", 3)], 4, gated=True, activation=activation).spec
    knows_silu_alone, knows_all = Linear(spec, Both()), Linear(spec, Every())
    knows_silu_alone.weights = {"factor": torch.tensor(0.5)}
    torch.testing.assert_close(knows_silu_alone.gated(x), gated_activation(activation)(0.5 * x))
    assert torch.equal(knows_all.gated(x), x + 100)


@pytest.mark.parametrize(("made", "taken"), [("silu", False), ("gelu_tanh", True)])
def test_activation_is_quantized_only_if_the_next_layer_was_made_for_it(made: Any, taken: bool) -> None:
    class Every(Particular):
        activations = ACTIVATIONS

    layers = make()
    gate_up = Linear(layers.linear([("gate", 4), ("up", 4)], 8, gated=True, activation="gelu_tanh").spec, Doubled())
    gate_up.weights = {"factor": torch.tensor(0.5)}
    for kernel, expected in ((Every(), taken), (Particular(), False)):
        down = Linear(layers.partial_linear("down", 8, 8, input_activation=made).linear.spec, kernel)
        down.weights = {"factor": torch.tensor(0.5)}
        assert isinstance(gate_up.gated_quantized_for(down, torch.randn(3, 8)), QuantizedActivation) is expected


def test_parts_of_one_stored_layer_are_read_from_slices_of_its_tensors() -> None:
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(3, 4))
    layer = layers.qkv(("q", "k", "v"), 6, num_heads=8, num_kv_heads=2, head_dim=4, bias=True, stored="qkv")
    found = {
        name: (spec.stored_in.name, spec.stored_in.start, spec.stored_in.size, spec.shape[0], spec.replicas)
        for name, spec in layer.tensors().items()
    }
    assert found == {
        **{f"q.{end}": (f"qkv.{end}", 0, 48, 32, 1) for end in ("weight", "bias")},
        **{f"k.{end}": (f"qkv.{end}", 32, 48, 8, 2) for end in ("weight", "bias")},
        **{f"v.{end}": (f"qkv.{end}", 40, 48, 8, 2) for end in ("weight", "bias")},
    }
    assert [part.stored_name for part in layer.spec.parts] == ["qkv"] * 3


def test_parts_that_share_a_number_of_the_stored_tensor_are_refused() -> None:
    class Packed(Doubled):
        def tensors(self) -> Any:
            return {"b.zeros": TensorSpec(shape=(2, 1), dtypes=("int32",), shard_dim=1)}

    spec = make().linear([("a", 12), ("b", 8)], 4, parallel="column", stored="ab").spec
    with pytest.raises(CheckpointError, match=r"ab holds b among its outputs, but b\.zeros packs outputs of several"):
        Linear(spec, Packed()).tensors()
    with pytest.raises(ConfigError, match="ab can only be stored in one with others if it is column-parallel"):
        make().linear([("a", 12), ("b", 8)], 4, stored="ab")


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'gelu_tan' is not known; did you mean gelu_tanh"):
        make().linear([("gate", 3), ("up", 3)], 4, gated=True, activation="gelu_tan")  # type: ignore[arg-type]


def test_only_row_parallel_layers_reduce_and_the_bias_is_added_once() -> None:
    calls = []

    class Group(LoneRank):
        def all_reduce(self, x: Any) -> Any:
            calls.append(x)
            return 2 * x  # as if the other rank had computed the same

    layers = make(group=Group(0, 2))
    row = layers.linear([("a", 3)], 4, bias=True, parallel="row")
    column = layers.linear([("b", 4)], 3, parallel="column")
    row.fill({"a.weight": torch.ones(3, 2), "a.bias": torch.full((3,), 10.0)})
    column.fill({"b.weight": torch.ones(2, 3)})
    assert torch.equal(row(torch.ones(1, 2)), torch.full((1, 3), 14.0))
    assert len(calls) == 1
    column(torch.ones(1, 3))
    assert len(calls) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_partial_linear_adds_the_bias_on_rank_0_only(rank: int) -> None:
    layers = make(group=LoneRank(rank, 2))
    layer = layers.partial_linear("a", 3, 4, bias=True)
    layer.linear.fill({"a.weight": torch.ones(3, 2), "a.bias": torch.full((3,), 10.0)})
    assert torch.equal(layer(torch.ones(1, 2)).addend, torch.full((1, 3), 12.0 if rank == 0 else 2.0))


@pytest.mark.parametrize(("parallel", "said"), [("column", "3 outputs of b"), ("row", "5 inputs of a")])
def test_sizes_that_ranks_do_not_divide_are_an_error(parallel: Any, said: str) -> None:
    layers = make(group=LoneRank(0, 2))
    with pytest.raises(ConfigError, match=f"2 ranks cannot share {said} evenly"):
        layers.linear([("a", 4), ("b", 3)], 5, parallel=parallel)


def test_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot compute in 'int8'; use one of float32"):
        make(dtype="int8")


class Made(QuantizedActivation):
    """A quantized activation for Particular."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Particular(Doubled, FusedInputQuantization):
    """Wants two rows and more made for it, with a factor of its own before it multiplies."""

    def fused_input_quantization(self) -> Any:
        return self

    def supports_rows(self, rows: Any) -> Any:
        return rows >= 2

    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: Any, weights: Any) -> Any:
        total = x if residual is None else x + residual
        return Made(norm_weight * total), total

    def activate_and_quantize(self, x: Any, weights: Any) -> Any:
        return Made(silu_and_mul(x) + weights["factor"])

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x.rows + 7 if isinstance(x, Made) else x, weights, bias)


class Gating(Doubled):
    """Fuses gating for one row."""

    def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
        return x[:, :4] - 1

    def fuses_gating(self, rows: Any) -> Any:
        return rows == 1


def linear(kernel: Any, **settings: Any) -> Any:
    layer = Linear(make().linear([("a", 8)], 8).spec, kernel, **settings)
    layer.weights = {"factor": torch.tensor(0.5)}
    return layer


def test_gated_output_is_quantized_for_the_rows_that_the_next_kernel_supports() -> None:
    down = linear(Particular())
    x = torch.randn(3, 8)
    for gate_up in (linear(Doubled()), linear(PlainKernel(down.spec))):
        gate_up.weights |= {"weight": torch.eye(8) * 0.5}
        y = gate_up(x)
        made = gate_up.gated_quantized_for(down, x)
        assert torch.equal(made.rows, silu_and_mul(y) + 0.5)
        assert torch.equal(down(made), 0.5 * (made.rows + 7))
        assert torch.equal(gate_up.gated_quantized_for(down, x[:1]), silu_and_mul(gate_up(x[:1])))
        assert torch.equal(gate_up.gated_quantized_for(down, x[None]), silu_and_mul(y)[None])
        assert torch.equal(gate_up.gated_quantized_for(gate_up, x), silu_and_mul(y))
    summed = linear(Particular(), reduce=lambda y: 3 * y)
    assert torch.equal(summed(made), 1.5 * (made.rows + 7))


def test_gated_layer_takes_a_quantized_activation() -> None:
    gate_up, down = linear(Particular()), linear(Particular())
    made, _ = gate_up.fused_input_quantization(torch.ones(2, 8)).norm_and_quantize(
        torch.randn(2, 8), None, torch.ones(8), 1e-5, gate_up.weights
    )
    y = 0.5 * (made.rows + 7)
    assert torch.equal(gate_up.gated(made), silu_and_mul(y))
    assert torch.equal(gate_up.gated_quantized_for(down, made).rows, silu_and_mul(y) + 0.5)
    assert torch.equal(gate_up.gated_quantized_for(linear(Doubled()), made), silu_and_mul(y))


def test_kernel_that_fuses_gating_is_preferred_to_fused_input_quantization() -> None:
    down = linear(Particular())
    x = torch.randn(2, 8)

    class Always(Gating):
        fuses_gating = LinearKernel.fuses_gating

    assert torch.equal(linear(Always()).gated_quantized_for(down, x), x[:, :4] - 1)
    assert torch.equal(linear(Gating()).gated_quantized_for(down, x[:1]), x[:1, :4] - 1)
    assert torch.equal(linear(Gating()).gated_quantized_for(down, x).rows, silu_and_mul(0.5 * x) + 0.5)
    assert not Doubled().fuses_gating(1)
    assert Doubled().fused_input_quantization() is None


class GatingQuantized(Particular):
    """Fuses gating for two rows, of quantized activations."""

    def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
        return x[:, :4] - 1

    def fuses_gating(self, rows: Any) -> Any:
        return False

    def fuses_quantized_gating(self, made: Any) -> Any:
        return len(made.rows) == 2

    def apply_quantized_gated(self, made: Any, weights: Any, bias: Any) -> Any:
        return made.rows[:, :4] - 2


def test_gating_is_fused_for_quantized_activations_that_the_kernel_wants() -> None:
    gate_up, down = linear(GatingQuantized()), linear(Particular())
    two, three = Made(torch.randn(2, 8)), Made(torch.randn(3, 8))
    assert torch.equal(gate_up.gated(two), two.rows[:, :4] - 2)
    assert torch.equal(gate_up.gated_quantized_for(down, two), two.rows[:, :4] - 2)
    activated = silu_and_mul(0.5 * (three.rows + 7))
    assert torch.equal(gate_up.gated(three), activated)
    assert torch.equal(gate_up.gated_quantized_for(down, three).rows, activated + 0.5)
    assert torch.equal(gate_up.gated_quantized_for(down, two.rows).rows, silu_and_mul(0.5 * two.rows) + 0.5)


def test_gating_of_quantized_activations_is_not_fused_without_a_gated_kernel_for_the_activation() -> None:
    two = Made(torch.randn(2, 8))
    activated = silu_and_mul(0.5 * (two.rows + 7))

    class OnlyQuantized(GatingQuantized):
        apply_gated = LinearKernel.apply_gated

    assert torch.equal(linear(OnlyQuantized()).gated(two), activated)
    summed = linear(GatingQuantized(), reduce=lambda y: y)
    assert torch.equal(summed.gated(two), activated)


def test_kernels_of_the_former_contract_do_not_fuse_gating_of_quantized_activations() -> None:
    """Also those that are their own FusedInputQuantization, and override the methods for tensors."""

    class Former(Particular):
        def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
            return x[:, :4] - 1

    two = Made(torch.randn(2, 8))
    assert torch.equal(linear(Former()).gated(two), silu_and_mul(0.5 * (two.rows + 7)))
    with pytest.raises(NotImplementedError, match=r"Former has no apply_quantized_gated\(\)"):
        Former().apply_quantized_gated(two, {}, None)


def test_activation_quantized_for_another_layer_is_an_error() -> None:
    with pytest.raises(TypeError, match="a takes tensors only; this activation was quantized for another layer"):
        linear(Doubled())(Made(torch.ones(2, 8)))


def test_plain_norm_does_not_quantize() -> None:
    layers = make()
    norm = layers.norm("norm", 8, 1e-5)
    norm.fill({"norm.weight": torch.randn(8)})
    x, residual = torch.randn(2, 2, 8)
    for given in (residual, None):
        for one, other in zip(norm.quantized_for(linear(Particular()), x, given), norm(x, given), strict=True):
            assert torch.equal(one, other)


def test_into_and_gated_into_are_aliases() -> None:
    layers, down = make(), linear(Particular())
    norm = layers.norm("norm", 8, 1e-5)
    norm.fill({"norm.weight": torch.randn(8)})
    x = torch.randn(3, 8)
    gate_up = linear(Doubled())
    assert torch.equal(gate_up.gated_into(down, x).rows, gate_up.gated_quantized_for(down, x).rows)
    assert torch.equal(norm.into(down, x)[0], norm.quantized_for(down, x)[0])
