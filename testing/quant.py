"""Conformance suite for quantization methods: compares linear layers and experts with products in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory, Linear, PlainKernel, gated_activation, silu_and_mul
from engine.core.quant import FLOAT8, Activation, KVScaleNames, QuantMethod
from engine.testing.quant_experts import ExpertsConformance
from engine.testing.quant_fused import FusedInputConformance
from engine.testing.stored_layers import ROWS, Make, StoredLayers, store_layers

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Maximum relative error (norm) of a row due to rounding, by dtype of activations."""
SCALES = (1.0, 30.0, 1 / 30)
"""Standard deviations of the parts' weights. With one tensor-wide scale, the smallest part would lose its digits."""


class QuantConformance(FusedInputConformance, ExpertsConformance):
    """Derive a class named Test... from this one, and set `method`.

    Layers are made and loaded as a model's are, so that core's part, such as sharding tensors over ranks, is tested
    too.
    """

    method: ClassVar[type[QuantMethod[Any]]]
    checkpoint: ClassVar[Mapping[str, Any] | None] = None
    """quantization_config of the checkpoints that `store` makes. None: they are unquantized."""
    options: ClassVar[Any] = None
    """Passed to the method. None: the defaults of its options_class."""
    error: ClassVar[float] = 0.0
    """Maximum error that quantizing weights (beyond what `store` returns) and activations adds to a row of outputs: the
    norm of the error over the norm of the row."""
    quantizes: ClassVar[bool] = True
    """False: the method leaves all layers unquantized."""
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"
    """Dtype of activations."""
    outputs: ClassVar[tuple[int, int, int]] = (64, 32, 32)
    """Outputs of a layer's parts, such as queries, keys and values. A layer of one part has the first."""
    inputs: ClassVar[int] = 128
    """Inputs of a layer."""
    ranks: ClassVar[tuple[int, ...]] = (2, 4)
    """Numbers of ranks to shard layers over. Those that the method refuses are skipped."""
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Name endings of tensors that a checkpoint may lack; without one, it represents another weight."""

    def store(self, name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return the stored tensors of a layer, by what follows "NAME." in their names, and the weight they represent.

        name: of the layer. weight: [out, in] float32; the weight returned may be a rounded one. Override this method
        together with `checkpoint`.
        """
        return {"weight": weight}, weight

    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    @pytest.mark.parametrize("rows", ROWS)
    def test_product(self, tmp_path: Path, rows: int, bias: bool) -> None:
        """x W^T + b, for one row, a few, and many."""
        stored = self.stored(tmp_path)
        x = self.x(rows)
        y = self.call(stored.load(self.one("a", bias=bias)), x)
        assert y.dtype == x.dtype, f"x is of {x.dtype}, the result of {y.dtype}"
        self._close(y, stored.product(x, "a", bias=bias), f"{rows} rows")

    def test_leading_dimensions(self, tmp_path: Path) -> None:
        """x may have any number of dimensions."""
        stored = self.stored(tmp_path)
        x = self.x(6)
        y = self.call(stored.load(self.one("a")), x.view(2, 3, -1))
        assert y.shape == (2, 3, self.outputs[0]), f"x of [2, 3, {self.inputs}] gives {list(y.shape)}"
        self._close(y.flatten(0, 1), stored.product(x, "a"), "2 x 3 rows")

    def test_merged_parts(self, tmp_path: Path) -> None:
        """Merged parts whose weights differ greatly in size keep their precision."""
        stored = self.stored(tmp_path)
        x = self.x(17)
        y = self.call(stored.load(self.merged(bias=True)), x)
        self._close_parts(y, stored.product(x, "abc", bias=True), self.outputs)

    @pytest.mark.parametrize("rows", ROWS)
    def test_gated(self, tmp_path: Path, rows: int) -> None:
        """silu(gate) * up, in one kernel or two."""
        stored = self.stored(tmp_path, dict.fromkeys(("gate", "up"), self.outputs[0]), (1.0, 1.0))
        layer = stored.load(self.gated)
        assert isinstance(layer.kernel.fuses_gating(rows), bool), "fuses_gating() does not return a bool"
        x = self.x(rows)
        expected = silu_and_mul(stored.product(x, ["gate", "up"]))
        with torch.inference_mode():
            y = layer.gated(x)
        # Relative to all rows together: products of two inexact numbers are small in some rows.
        assert y.shape == expected.shape, f"gated, {rows} rows: shape {list(y.shape)}, not {list(expected.shape)}"
        self._close(y.reshape(1, -1), expected.reshape(1, -1), f"gated, {rows} rows", 3.0)

    @pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_oai"])
    def test_gated_by_other_activations(self, tmp_path: Path, activation: Activation) -> None:
        """Gated layers whose activation is not silu, alone and quantized for the next layer."""
        size = self.outputs[0]
        stored = self.stored(tmp_path, {"gate": self.inputs, "up": self.inputs, "down": size}, (1.0, 1.0, 1.0))
        layer = stored.load(
            lambda layers: layers.linear(
                [("gate", self.inputs), ("up", self.inputs)], self.inputs, gated=True, activation=activation
            )
        )
        down = stored.load(
            lambda layers: layers.partial_linear("down", size, self.inputs, input_activation=activation).linear
        )
        for rows in (2, 64):
            x = self.x(rows)
            expected = gated_activation(activation)(stored.product(x, ["gate", "up"]))
            with torch.inference_mode():
                y = layer.gated(x)
                quantized, separate = down(layer.gated_quantized_for(down, x)), down(y)
            self._close(y.reshape(1, -1), expected.reshape(1, -1), f"{activation}, {rows} rows", 3.0)
            self._close(quantized, separate.double().cpu(), f"{activation} of {rows} rows, quantized")

    def test_column_parallel(self, tmp_path: Path) -> None:
        """The outputs of all ranks, concatenated part by part, are those of one rank."""
        stored = self.stored(tmp_path)
        x = self.x(17)
        for ranks in self.ranks:
            shards = stored.shard(self.merged(bias=True, parallel="column"), ranks)
            found = [torch.split(self.call(shard, x), [size // ranks for size in self.outputs], -1) for shard in shards]
            together = torch.cat([piece for part in zip(*found, strict=True) for piece in part], -1)
            self._close_parts(together, stored.product(x, "abc", bias=True), self.outputs, f"{ranks} ranks, ")

    def test_row_parallel(self, tmp_path: Path) -> None:
        """The partial sums of all ranks add up to the result of one rank."""
        stored = self.stored(tmp_path)
        x = self.x(17)
        for ranks in self.ranks:
            shards = stored.shard(self.one("a", parallel="row"), ranks)
            sums = [self.call(shard, part) for shard, part in zip(shards, x.chunk(ranks, -1), strict=True)]
            total = torch.stack([part.double() for part in sums]).sum(0).to(x.dtype)
            self._close(total, stored.product(x, "a"), f"the sum over {ranks} ranks", 1.5)

    def test_kv_head_replicas(self, tmp_path: Path) -> None:
        """KV head replicas: adjacent ranks have the same keys and values, and different queries."""
        heads, ranks, head_dim = 4, 4, self.outputs[1] // 2
        stored = self.stored(tmp_path)
        if self.outputs[0] != heads * head_dim:
            pytest.skip(f"{self.outputs} are not {heads} heads of queries and 2 of keys and values")
        x = self.x(2)
        queries, *others = torch.split(stored.product(x, "abc"), list(self.outputs), -1)
        names = ("a", "b", "c")
        for rank, shard in enumerate(
            stored.shard(
                lambda layers: layers.qkv(names, self.inputs, num_heads=heads, num_kv_heads=2, head_dim=head_dim),
                ranks,
            )
        ):
            mine = [queries.chunk(ranks, -1)[rank], *(part.chunk(2, -1)[rank // 2] for part in others)]
            parts = [part.shape[-1] for part in mine]
            self._close_parts(self.call(shard, x), torch.cat(mine, -1), parts, f"rank {rank} of {ranks}, ")

    def test_arguments_are_not_modified(self, tmp_path: Path) -> None:
        """Neither the loaded tensors nor x, weights and bias are written to."""
        stored = self.stored(tmp_path, dict.fromkeys(("gate", "up"), self.outputs[0]), (1.0, 1.0))
        kernel = stored.load(self.gated).kernel
        loaded = stored.loaded(kernel)
        bias = torch.ones(2 * self.outputs[0], device=self.device, dtype=self.x(1).dtype)
        with torch.inference_mode():
            before = copy(loaded)
            given = {"x": self.x(17), "the bias": bias, **kernel.prepare(loaded)}
            for name, tensor in loaded.items():
                assert same(tensor, before[name]), f"prepare() changed {name}, which it was given"
            before = copy(given)
            for name in ("apply", "apply_gated"):
                weights = {key: given[key] for key in list(given)[2:]}
                getattr(kernel, name)(given["x"], weights, bias)
                for key, tensor in given.items():
                    assert same(tensor, before[key]), f"{name}() changed {key}, which it was given"

    def test_calls_are_independent(self, tmp_path: Path) -> None:
        """A call depends on its arguments alone: not on earlier calls with other rows, values or weights."""
        size = self.outputs[0]
        stored = self.stored(tmp_path, dict.fromkeys("ab", size), (1.0, 1.0))
        kernel = stored.load(self.one("a")).kernel
        others = stored.loaded(stored.load(self.one("b")).kernel)
        with torch.inference_mode():
            weights = {
                "a": kernel.prepare(stored.loaded(kernel)),
                "b": kernel.prepare({f"a.{name.removeprefix('b.')}": tensor for name, tensor in others.items()}),
            }
            x = self.x(17)
            for name, rows, seed in (("a", 17, 0), ("a", 17, 0), ("a", 2, 0), ("b", 17, 0), ("a", 17, 1), ("a", 17, 0)):
                x.copy_(self.x(17, seed))
                y = kernel.apply(x[:rows], weights[name], None)
                self._close(y, stored.product(x[:rows], name), f"{rows} rows after others")

    def test_captured_calls(self, tmp_path: Path) -> None:
        """A replayed CUDA graph computes from the current contents of x."""
        if torch.device(self.device).type != "cuda":
            pytest.skip("graphs are captured on a GPU")
        stored = self.stored(tmp_path)
        layer = stored.load(self.one("a", bias=True))
        for rows in ROWS:
            x = self.x(rows)
            self.call(layer, x)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph):
                y = layer(x)
            for seed in (1, 2):
                x.copy_(self.x(rows, seed))
                graph.replay()
                self._close(y, stored.product(x, "a", bias=True), f"a replay of {rows} rows")

    def test_wrong_shapes_are_refused(self, tmp_path: Path) -> None:
        """Each tensor, one longer than expected in one dimension, is refused by name."""
        stored = self.stored(tmp_path)
        for name, tensor in stored.loaded(stored.load(self.one("a")).kernel).items():
            for dim in range(tensor.dim()):
                wrong = torch.cat([tensor.cpu(), tensor.cpu().narrow(dim, 0, 1)], dim)
                self._check_refused(stored, name, wrong, f"of shape {list(wrong.shape)}")

    def test_missing_tensors_are_refused(self, tmp_path: Path) -> None:
        """Each missing tensor is refused by name, unless the layer computes the same without it."""
        stored = self.stored(tmp_path)
        x = self.x(2)
        for name in stored.loaded(stored.load(self.one("a")).kernel):
            if name.endswith(self.may_lack):
                continue
            try:
                y = self.call(stored.load(self.one("a"), changed={name: None}), x)
            except CheckpointError as error:
                self._check_named(name, "missing", str(error))
            else:
                self._close(y, stored.product(x, "a"), f"without {name}")

    def _check_refused(self, stored: StoredLayers, name: str, tensor: torch.Tensor, what: str) -> None:
        refusal = None
        try:
            stored.load(self.one("a"), changed={name: tensor})
        except CheckpointError as error:
            refusal = str(error)
        self._check_named(name, what, refusal)

    def _check_named(self, name: str, what: str, refusal: str | None) -> None:
        assert refusal is not None, f"{name}, {what}, is not refused"
        assert name in refusal, f"{name}, {what}, is refused without its name: {refusal}"

    def test_refusals(self) -> None:
        """The method serves its own checkpoints, and refuses those of an unknown method with a sentence."""
        device = torch.device(self.device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        info = DeviceInfo(
            type="cuda" if device.type == "cuda" else "cpu", index=device.index or 0, capability=capability
        )
        refusal = self.method.refuses(self.checkpoint, info)
        assert refusal is None, f"{self.method.__name__} refuses its checkpoint on {self.device}: {refusal}"
        refusal = self.method.refuses({"quant_method": "unknown"}, info)
        assert isinstance(refusal, str), f"refuses() returned {refusal!r} to an unknown method"
        assert refusal, "refuses() returned an empty string"

    def test_layers_are_quantized(self, tmp_path: Path) -> None:
        """The method quantizes layers: one that leaves all unquantized would pass the other tests."""
        own = not isinstance(self.stored(tmp_path).load(self.one("a")).kernel, PlainKernel)
        assert own is self.quantizes, f"the method {'quantizes' if own else 'does not quantize'} a linear layer"

    def test_kv_cache_dtype_and_scales(self) -> None:
        """kv_dtype names a dtype that a KV cache can have; kv_scales names tensors."""
        wanted = self.method.kv_dtype(self.checkpoint)
        assert wanted in (None, FLOAT8, *TOLERANCE), f"kv_dtype() returned {wanted!r}"
        names = self.make().kv_scales("model.layers.0.self_attn")
        if names is not None:
            assert isinstance(names, KVScaleNames), f"kv_scales() returned {names!r}"
            assert names.keys, "kv_scales() knows no name of a scale of keys"
            assert names.values, "kv_scales() knows no name of a scale of values"

    def make(self) -> QuantMethod[Any]:
        """Make a new instance of the method."""
        options = self.options
        if options is None and self.method.options_class is not None:
            options = self.method.options_class()
        return self.method.from_checkpoint(self.checkpoint, options)

    def stored(
        self, directory: Path, sizes: Mapping[str, int] | None = None, scales: Sequence[float] = SCALES
    ) -> StoredLayers:
        """Store layers a, b and c, or those named in `sizes`, with these numbers of outputs."""
        sizes = sizes or dict(zip("abc", self.outputs, strict=True))
        return store_layers(
            directory, sizes, self.inputs, self.store, self.make, scales=scales, device=self.device, dtype=self.dtype
        )

    def one(self, name: str, **settings: Any) -> Make:
        """A layer of one part."""
        return lambda layers: layers.linear([(name, self.outputs[0])], self.inputs, **settings)

    def merged(self, **settings: Any) -> Make:
        """A layer of three parts."""
        return lambda layers: layers.linear(list(zip("abc", self.outputs, strict=True)), self.inputs, **settings)

    def gated(self, layers: LayerFactory) -> Linear:
        """A layer of a gate and an up projection."""
        parts = [("gate", self.outputs[0]), ("up", self.outputs[0])]
        return layers.linear(parts, self.inputs, gated=True)

    def x(self, rows: int, seed: int = 0) -> torch.Tensor:
        """[rows, inputs], random."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(rows, self.inputs, generator=draw).to(self.device, getattr(torch, self.dtype))

    def call(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for x."""
        with torch.inference_mode():
            return layer(x)

    def _close_parts(self, found: torch.Tensor, expected: torch.Tensor, sizes: Sequence[int], what: str = "") -> None:
        assert found.shape == expected.shape, f"{what}shape {list(found.shape)}, not {list(expected.shape)}"
        pairs = zip(*(torch.split(tensor, list(sizes), -1) for tensor in (found, expected)), strict=True)
        for number, (part, meant) in enumerate(pairs):
            self._close(part, meant, f"{what}part {number}")

    def _close(self, found: torch.Tensor, expected: torch.Tensor, what: str, fraction: float = 1.0) -> None:
        """Assert a relative error of at most fraction * error + TOLERANCE."""
        assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, not {list(expected.shape)}"
        errors = (found.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        limit = fraction * self.error + TOLERANCE[self.dtype]
        row, largest = int(errors.argmax()), float(errors.max())
        assert largest <= limit, f"{what}: relative error {largest:.2e} in row {row}, more than {limit:.1e}"


def copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each tensor."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_mkldnn:  # in a layout of oneDNN's own
        return torch.equal(one.to_dense(), other.to_dense())
    pair = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)
