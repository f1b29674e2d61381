"""A correct quantization method, and faulty ones that the conformance suite must find. Each fault changes one thing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.errors import CheckpointError
from engine.core.quant.base import (
    FusedInputQuantization,
    KVScaleNames,
    LinearKernel,
    QuantizedActivation,
    QuantMethod,
    TensorSpec,
)
from engine.testing.quant import QuantConformance

HALVED = {"quant_method": "halved"}


class Kernel(LinearKernel):
    """Stores halves of the weight and a scale of 2 per output. The faulty kernels below change one thing each."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def tensors(self) -> Any:
        spec = self.spec
        halves = {"column": 0, "row": 1}.get(spec.parallel)
        scales = {"column": 0}.get(spec.parallel)
        found = {}
        for part in spec.parts:
            shape = (part.out_features, spec.in_features)
            found[f"{part.name}.halves"] = TensorSpec(shape=shape, dtypes=("float32",), shard_dim=halves)
            found[f"{part.name}.scale"] = TensorSpec(shape=shape[:1], dtypes=("float32",), shard_dim=scales)
        return found

    def prepare(self, loaded: Any) -> Any:
        halves, scales = (torch.cat([loaded[f"{part.name}.{end}"] for part in self.spec.parts]) for end in ENDS)
        return {"halves": halves, "scale": scales}

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        y = F.linear(x, weights["halves"].to(x.dtype)) * weights["scale"].to(x.dtype)
        return y if bias is None else y + bias


ENDS = ("halves", "scale")


class Method(QuantMethod):
    api = "1"
    kernel = Kernel

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> Any:
        return None if checkpoint == HALVED else f"it reads halved weights, not {checkpoint}"

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: Any) -> Any:
        return cls()

    def linear(self, spec: Any) -> Any:
        return self.kernel(spec)


class Halved(QuantConformance):
    method = Method
    checkpoint = HALVED

    def store(self, name: Any, weight: Any) -> Any:
        return {"halves": weight / 2, "scale": torch.full((len(weight),), 2.0)}, weight


class Made(QuantizedActivation):
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Fused(FusedInputQuantization):
    """Computes the definition; supports more than one row."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def supports_rows(self, rows: Any) -> Any:
        return rows > 1

    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: Any, weights: Any) -> Any:
        total = x if residual is None else x + residual
        return Made(F.rms_norm(total, norm_weight.shape, norm_weight, eps)), total

    def activate_and_quantize(self, x: Any, weights: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return Made(F.silu(gate) * up)

    def apply(self, made: Any, weights: Any, bias: Any) -> Any:
        return self.kernel.apply(made.x, weights, bias)


class ByRow(Fused):
    """Quantizes rows that ranks can share."""

    has_row_tensors = True

    def row_tensors(self, made: Any) -> Any:
        return made.x, made.x.sum(1)

    def from_row_tensors(self, tensors: Any) -> Any:
        return Made(tensors[0])


class Preparing(Kernel):
    kind = Fused

    def fused_input_quantization(self) -> Any:
        return self.kind(self)


class Gating(Kernel):
    def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
        gate, up = self.apply(x, weights, bias).chunk(2, -1)
        return F.silu(gate) * up

    def fuses_gating(self, rows: Any) -> Any:
        return rows < 20


def method_of(kernel: type[LinearKernel], **members: Any) -> type[QuantMethod[Any]]:
    return type("Faulty", (Method,), {"kernel": kernel, **members})


class ManyRows(Kernel):
    """Computes tiles of 16 rows, and leaves the rest."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        y = super().apply(x, weights, bias)
        y[len(y) // 16 * 16 :] = 0
        return y


class LastRow(Kernel):
    """Overlooks the last row of many."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        y = super().apply(x, weights, bias)
        y[64 - 1 :] = 0
        return y


class Unbiased(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, weights, None)


class Wide(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x.double(), weights, bias)


class Flat(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x.reshape(-1, x.shape[-1]), weights, bias)


class OneScale(Kernel):
    """Rounds all parts by the largest."""

    def prepare(self, loaded: Any) -> Any:
        weights = super().prepare(loaded)
        unit = weights["halves"].abs().max() / 2000
        return {**weights, "halves": (weights["halves"] / unit).round() * unit}


class FirstScale(Kernel):
    """Takes each part to have the scales of the first."""

    def prepare(self, loaded: Any) -> Any:
        weights = super().prepare({name: loaded[name] for name in loaded})
        first = loaded[f"{self.spec.parts[0].name}.halves"]
        size = first.norm() / weights["halves"][-len(first) :].norm()
        return {**weights, "scale": weights["scale"] * size}


class Backwards(Kernel):
    """Has the parts in another order."""

    def prepare(self, loaded: Any) -> Any:
        self.spec = evolve(self.spec, parts=tuple(sorted(self.spec.parts, key=lambda part: part.name, reverse=True)))
        return super().prepare(loaded)


class UpAlone(Kernel):
    def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
        gate, up = self.apply(x, weights, bias).chunk(2, -1)
        return gate * up


class Undecided(Gating):
    def fuses_gating(self, rows: Any) -> Any:
        return None


def sharded(halves: Any, scales: Any) -> type[LinearKernel]:
    """A kernel whose tensors are shared out so, whatever `parallel` is."""

    class Shared(Kernel):
        def tensors(self) -> Any:
            dims = {"halves": halves, "scale": scales}
            found = super().tensors()
            return {
                name: spec if spec.shard_dim is None else evolve(spec, shard_dim=dims[name.rpartition(".")[2]])
                for name, spec in found.items()
            }

    return Shared


class FirstInputs(Kernel):
    """Has every rank read all of the weight, and multiplies by the columns of the first."""

    def tensors(self) -> Any:
        return {name: evolve(spec, shard_dim=None) for name, spec in super().tensors().items()}

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, {**weights, "halves": weights["halves"][:, : x.shape[-1]]}, bias)


class BlockOfRank(Kernel):
    """Takes its outputs for those of the spec, over all ranks."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, weights, bias)[..., : self.spec.parts[0].out_features]


class OwnCopies(Kernel):
    """Counts the outputs of its parts without those that several ranks have."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        ranks = self.spec.ranks if self.spec.parallel == "column" else 1
        return super().apply(x, weights, bias)[..., : self.spec.out_features // ranks]


class InPlace(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        y = super().apply(x, weights, bias)
        x.mul_(2)
        return y


class GrowingWeights(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        weights["scale"].mul_(1.001)
        return super().apply(x, weights, bias)


class BiasInPlace(Kernel):
    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply(x, weights, bias if bias is None else bias.mul_(2))


class GatedInPlace(Gating):
    def apply_gated(self, x: Any, weights: Any, bias: Any) -> Any:
        return super().apply_gated(x.mul_(2), weights, bias)


class Centring(Kernel):
    """Prepares in the memory it was given."""

    def prepare(self, loaded: Any) -> Any:
        for name, tensor in loaded.items():
            if name.endswith("halves"):
                tensor.mul_(2)
        return {name: tensor / 2 if name == "halves" else tensor for name, tensor in super().prepare(loaded).items()}


class Remembering(Kernel):
    """Keeps the result of an x by where it is in memory."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.known = {}

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        key = x.data_ptr(), tuple(x.shape), id(weights)
        if key not in self.known:
            self.known[key] = super().apply(x, weights, bias)
        return self.known[key]


class FirstWeights(Kernel):
    """Multiplies by the weights that it saw first."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        self.first = getattr(self, "first", weights)
        return super().apply(x, self.first, bias)


class Accumulating(Kernel):
    """Adds to what is left in its workspace."""

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        y = super().apply(x, weights, bias)
        if getattr(self, "left", None) is None or self.left.shape != y.shape:
            self.left = torch.zeros_like(y)
        self.left += y
        return self.left.clone()


class AnyShape(Kernel):
    def tensors(self) -> Any:
        return {name: evolve(spec, shape=(-1,) * len(spec.shape)) for name, spec in super().tensors().items()}

    def apply(self, x: Any, weights: Any, bias: Any) -> Any:
        weights = {"halves": weights["halves"][: len(weights["scale"]), : x.shape[-1]], "scale": weights["scale"]}
        weights["scale"] = weights["scale"][: len(weights["halves"])]
        return super().apply(x, weights, bias)


class Nameless(AnyShape):
    """Refuses, but does not say what."""

    def prepare(self, loaded: Any) -> Any:
        for name, tensor in loaded.items():
            if tensor.shape != Kernel.tensors(self)[name].shape:
                raise CheckpointError("a tensor has a wrong shape")
        return super().prepare(loaded)


class Unscaled(Kernel):
    """Takes weights without scales for plain ones."""

    def tensors(self) -> Any:
        return {name: evolve(spec, optional=name.endswith("scale")) for name, spec in super().tensors().items()}

    def prepare(self, loaded: Any) -> Any:
        ones = {f"{part.name}.scale": torch.ones(part.out_features) for part in self.spec.parts}
        return super().prepare({**ones, **loaded})


class Silent(Unscaled):
    """Does not say what it lacks."""

    def prepare(self, loaded: Any) -> Any:
        if len(loaded) < 2:
            raise CheckpointError("the checkpoint lacks something")
        return super().prepare(loaded)


class Residual(Fused):
    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: Any, weights: Any) -> Any:
        return super().norm_and_quantize(x, None, norm_weight, eps, weights)


class SumAlone(Fused):
    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: Any, weights: Any) -> Any:
        return super().norm_and_quantize(x, residual, norm_weight, eps, weights)[0], x


class Unweighted(Fused):
    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: Any, weights: Any) -> Any:
        return super().norm_and_quantize(x, residual, torch.ones_like(norm_weight), eps, weights)


class Swapped(Fused):
    def activate_and_quantize(self, x: Any, weights: Any) -> Any:
        return super().activate_and_quantize(torch.cat(x.chunk(2, -1)[::-1], -1), weights)


class FirstRowAgain(ByRow):
    """Gives back the first row in place of the last."""

    def from_row_tensors(self, tensors: Any) -> Any:
        x = tensors[0].clone()
        x[-1] = x[0]
        return Made(x)


class OneScaleOfRows(ByRow):
    def row_tensors(self, made: Any) -> Any:
        return made.x, made.x.sum()[None]


def preparing(fused: type[FusedInputQuantization]) -> type[LinearKernel]:
    return type("Prepared", (Preparing,), {"kind": fused})


def refusing(answer: Any) -> type[QuantMethod[Any]]:
    return named(refuses=classmethod(lambda cls, checkpoint, device: answer(checkpoint)))


def scaled(names: Any) -> type[QuantMethod[Any]]:
    return named(kv_scales=lambda self, attention: names)


def named(**members: Any) -> type[QuantMethod[Any]]:
    return method_of(Kernel, **members)


FAULTS = [
    (method_of(ManyRows), "test_product", (2, False), "2 rows: relative error 1.00e"),
    (method_of(ManyRows), "test_product", (17, True), "in row 16"),
    (method_of(LastRow), "test_product", (64, False), "in row 63"),
    (method_of(Unbiased), "test_product", (1, True), "relative error"),
    (method_of(Wide), "test_product", (2, False), "the result of torch.float64"),
    (method_of(Flat), "test_leading_dimensions", (), r"gives \[6, 64\]"),
    (method_of(OneScale), "test_merged_parts", (), "part 0: relative error"),
    (method_of(FirstScale), "test_merged_parts", (), "part 0: relative error"),
    (method_of(Backwards), "test_merged_parts", (), "part 0: relative error"),
    (method_of(BlockOfRank), "test_merged_parts", (), r"shape \[17, 64\], not \[17, 128\]"),
    (method_of(UpAlone), "test_gated", (17,), "gated, 17 rows: relative error"),
    (method_of(Undecided), "test_gated", (1,), "does not return a bool"),
    (method_of(sharded(None, None)), "test_column_parallel", (), "size of tensor"),
    (method_of(sharded(0, None)), "test_column_parallel", (), "size of tensor"),
    (method_of(Backwards), "test_column_parallel", (), "2 ranks, part 0: relative error"),
    (method_of(FirstInputs), "test_row_parallel", (), "the sum over 2 ranks: relative error"),
    (method_of(sharded(0, None)), "test_row_parallel", (), "shapes cannot be multiplied"),
    (method_of(OwnCopies), "test_kv_head_replicas", (), "rank 0 of 4, shape"),
    (method_of(InPlace), "test_arguments_are_not_modified", (), r"apply\(\) changed x"),
    (method_of(GrowingWeights), "test_arguments_are_not_modified", (), r"apply\(\) changed scale"),
    (method_of(BiasInPlace), "test_arguments_are_not_modified", (), r"apply\(\) changed the bias"),
    (method_of(GatedInPlace), "test_arguments_are_not_modified", (), r"apply_gated\(\) changed x"),
    (method_of(Centring), "test_arguments_are_not_modified", (), r"prepare\(\) changed gate.halves"),
    (method_of(Remembering), "test_calls_are_independent", (), "17 rows after others: relative"),
    (method_of(FirstWeights), "test_calls_are_independent", (), "17 rows after others: relative"),
    (method_of(Accumulating), "test_calls_are_independent", (), "17 rows after others: relative"),
    (method_of(preparing(Residual)), "test_fused_input_quantization", (17,), "the sum of 17 rows with a residual"),
    (method_of(preparing(SumAlone)), "test_fused_input_quantization", (17,), "the sum of 17 rows with a residual"),
    (method_of(preparing(Unweighted)), "test_fused_input_quantization", (2,), "the norm of 2 rows without a residual"),
    (method_of(preparing(OneScaleOfRows)), "test_fused_input_quantization", (17,), r"8 rows are of \[8, 1\] rows"),
    (method_of(preparing(FirstRowAgain)), "test_fused_input_quantization", (17,), "17 rows quantized in two parts"),
    (method_of(preparing(Swapped)), "test_fused_input_quantization", (2,), "the activation of 2 rows"),
    (method_of(AnyShape), "test_wrong_shapes_are_refused", (), "is not refused"),
    (method_of(Nameless), "test_wrong_shapes_are_refused", (), "is refused without its name"),
    (method_of(Unscaled), "test_missing_tensors_are_refused", (), "without a.scale: relative error"),
    (method_of(Silent), "test_missing_tensors_are_refused", (), "a.scale, missing, is refused without its name"),
    (refusing(lambda checkpoint: None), "test_refusals", (), "returned None to an unknown method"),
    (refusing(lambda checkpoint: "no"), "test_refusals", (), "refuses its checkpoint on cpu: no"),
    (refusing(lambda checkpoint: checkpoint != HALVED or None), "test_refusals", (), "returned True"),
    (refusing(lambda checkpoint: "" if checkpoint != HALVED else None), "test_refusals", (), "an empty string"),
    (
        named(kv_dtype=classmethod(lambda cls, checkpoint: "fp8")),
        "test_kv_cache_dtype_and_scales",
        (),
        "returned 'fp8'",
    ),
    (scaled(("k_scale", "v_scale")), "test_kv_cache_dtype_and_scales", (), "returned"),
    (
        scaled(KVScaleNames(keys=("k",), values=())),
        "test_kv_cache_dtype_and_scales",
        (),
        "no name of a scale of values",
    ),
    (scaled(KVScaleNames(keys=(), values=("v",))), "test_kv_cache_dtype_and_scales", (), "no name of a scale of keys"),
]
