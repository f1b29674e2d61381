"""Base of the W8 kernels: reads or makes quantized weights and scales, and merges parts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers import WEIGHT_SHARD_DIM, plain_tensor, torch_dtype
from engine.core.quant import LinearKernel, LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.rounding import BLOCK, quantize

SCALE_DTYPES = ("float32", "bfloat16", "float16")
NAMES = {"float8_e4m3fn": "fp8", "int8": "int8"}

W8Dtype = Literal["float8_e4m3fn", "int8"]
Granularity = Literal["tensor", "channel", "block"]
"""What shares a scale: a part of a merged layer, an output, or a block of 128 x 128."""
Activations = Literal["none", "token", "static"]
"""none: not quantized. token: a scale per token, computed from its values. static: one stored scale."""
NONE: Activations = "none"
TOKEN: Activations = "token"
STATIC: Activations = "static"


@frozen(kw_only=True)
class W8Format:
    """How a linear layer's weights and activations are quantized."""

    dtype: W8Dtype
    """Dtype of the weights."""
    granularity: Granularity
    activations: Activations
    scale_names: tuple[str, ...] = ()
    """Names of the scales in the checkpoint. Empty: the checkpoint is unquantized, and weights are quantized at
    load."""
    input_scale_names: tuple[str, ...] = ()
    """Names of the scales of activations; read if `activations` is static, else ignored."""
    scale_vector: bool = False
    """Whether stored scales per channel have one dimension, [out], instead of [out, 1]."""
    powers_of_two: bool = False
    """Whether scales of blocks and of their activations are powers of two, stored as such or as float8_e8m0fnu."""
    max_activation: float | None = None
    """Activations beyond +-max_activation are clamped to it before they are quantized. None: none are."""

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint's weights are quantized."""
        return bool(self.scale_names)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        shared = {"tensor": "per tensor", "channel": "per channel", "block": f"per {BLOCK} x {BLOCK} block"}
        came = "" if self.is_stored else " (quantized while loading)"
        return f"{NAMES[self.dtype]} weights {shared[self.granularity]}{came}"


@frozen(kw_only=True)
class W8Weight:
    """The quantized weight of one linear layer on this rank, its parts concatenated along the outputs."""

    weight: torch.Tensor
    """[out, in]."""
    scale: torch.Tensor
    """float32: [out], or per block [ceil(out / scale_rows), ceil(in / 128)]."""
    input_scale: torch.Tensor | None
    """[1] float32, of static activations: the largest of the parts' scales."""


class W8Kernel(LinearKernel):
    """Reads quantized weights and scales, or quantizes plain weights. Subclasses multiply."""

    def __init__(self, spec: LinearSpec, form: W8Format) -> None:
        """Raises CheckpointError where sharding the layer would cut blocks."""
        self.spec = spec
        self.form = form
        sizes = [part.out_features for part in spec.parts[:-1]]
        self.scale_rows = math.gcd(BLOCK, *sizes) if form.granularity == "block" else 0
        """Outputs per scale of a block, once the parts are merged. 0: no blocks."""
        for part in spec.parts:
            self._check_shards(part)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """NAME.weight of each part, and its scales."""
        return {name: spec for part in self.spec.parts for name, spec in self._tensors_of(part).items()}

    def _tensors_of(self, part: LinearPart) -> dict[str, TensorSpec]:
        spec, form = self.spec, self.form
        shape = (part.out_features, spec.in_features)
        shard_dim = WEIGHT_SHARD_DIM[spec.parallel]
        weight = f"{part.name}.weight"
        if not form.is_stored:
            return {weight: plain_tensor(shape, spec.dtype, shard_dim)}
        dtypes: tuple[str, ...] = SCALE_DTYPES
        scale_shape: tuple[int, ...] = (1,)
        scale_shard = None
        if form.granularity == "channel":
            channels = (part.out_features,) if form.scale_vector else (part.out_features, 1)
            scale_shape, scale_shard = channels, 0 if shard_dim == 0 else None
        elif form.granularity == "block":
            scale_shape, scale_shard = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), shard_dim
            dtypes = (*SCALE_DTYPES, "float8_e8m0fnu", *(("uint8",) if form.powers_of_two else ()))
        inputs = form.input_scale_names
        return {
            weight: TensorSpec(shape=shape, dtypes=(form.dtype,), shard_dim=shard_dim),
            **{
                f"{part.name}.{name}": TensorSpec(
                    shape=scale_shape, dtypes=dtypes, shard_dim=scale_shard, optional=len(form.scale_names) > 1
                )
                for name in form.scale_names
            },
            **{
                f"{part.name}.{name}": TensorSpec(
                    shape=(1,), dtypes=SCALE_DTYPES, optional=len(inputs) > 1 or form.activations != STATIC
                )
                for name in inputs
            },
        }

    def merge(self, loaded: Mapping[str, torch.Tensor]) -> W8Weight:
        """Merge the parts into one weight. Raises CheckpointError for missing, invalid or ambiguous scales.

        Parts are quantized one after the other into the memory of the merged weight.
        """
        sizes = [loaded[f"{part.name}.weight"].shape for part in self.spec.parts]
        dtype = self.form.torch_dtype
        first = loaded[f"{self.spec.parts[0].name}.weight"]
        weight = first
        if len(sizes) > 1:
            weight = torch.empty((sum(size[0] for size in sizes), sizes[0][1]), dtype=dtype, device=first.device)
        scales, begin = [], 0
        for part, size in zip(self.spec.parts, sizes, strict=True):
            stored = loaded[f"{part.name}.weight"]
            if self.form.is_stored:
                scale = self._scale_of(part, loaded, self.form.scale_names)
            else:
                stored, scale = quantize(stored, dtype, self.form.granularity)
            scales.append(self._spread_scale(scale, size))
            if len(sizes) > 1:
                weight[begin : begin + size[0]] = stored
            else:
                weight = stored
            begin += size[0]
        input_scale = None
        if self.form.activations == STATIC:
            found = [self._scale_of(part, loaded, self.form.input_scale_names) for part in self.spec.parts]
            input_scale = torch.stack(found).amax(0)
        return W8Weight(weight=weight, scale=torch.cat(scales), input_scale=input_scale)

    def _scale_of(self, part: LinearPart, loaded: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
        found = [f"{part.name}.{name}" for name in names if f"{part.name}.{name}" in loaded]
        if len(found) != 1:
            wanted = " or ".join(f"{part.name}.{name}" for name in names)
            raise CheckpointError(
                f"the checkpoint has {'two' if found else 'no'} scales for {part.name}: want {wanted}; fetch it again,"
                " or use another checkpoint"
            )
        stored = loaded[found[0]]
        # Some programs store powers of two as the bytes of float8_e8m0fnu.
        scale = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
        if not bool((scale.isfinite() & (scale != 0)).all()):
            raise CheckpointError(
                f"tensor {found[0]} has scales that are zero or not finite; fetch the checkpoint again"
            )
        return scale

    def _check_shards(self, part: LinearPart) -> None:
        spec = self.spec
        sizes = (
            (spec.rank_outputs(part), part.out_features, "outputs"),
            (spec.rank_inputs, spec.in_features, "inputs"),
        )
        for local, total, what in sizes:
            if self.scale_rows and local != total and local % BLOCK:
                raise CheckpointError(
                    f"{spec.ranks} ranks cannot share {part.name}: each would have {local} of its {total} {what},"
                    f" which cuts blocks of {BLOCK}; use fewer ranks or a checkpoint quantized per channel"
                )

    def _spread_scale(self, scale: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """A part's scales in the shape that `W8Weight` has."""
        if not self.scale_rows:
            return scale.reshape(-1).expand(size[0]).contiguous()
        return scale.repeat_interleave(BLOCK // self.scale_rows, 0)[: -(-size[0] // self.scale_rows)]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return torch_dtype(self.spec.dtype)

    @property
    def activation_scales(self) -> str:
        """What shares a scale of activations, for the log.

        A rank computes the scales from the inputs that it has. The scale of a whole row would take an all-reduce of
        maxima before each row-parallel GEMM, and is coarser.
        """
        if self.form.activations != TOKEN:
            return "by a stored scale"
        if self.scale_rows:
            return f"per token and {BLOCK} inputs"
        return "per token and rank" if self.spec.parallel == "row" and self.spec.ranks > 1 else "per token"

    @abstractmethod
    def describe(self) -> str:
        """How the layer computes, for the log."""

    def slow(self) -> str | None:
        """Why the layer will be slow, for a warning. None: it will not."""
        return None
