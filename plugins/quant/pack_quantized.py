"""Reads modules of compressed-tensors' format pack-quantized: weights of 4 or 8 bits (W4A16, W8A16).

A module has weight_packed [outputs, inputs * bits / 32] int32, lowest field first, of q + 2^(bits - 1); weight_scale
[outputs, groups]; if asymmetric weight_zero_point [outputs * bits / 32, groups], packed along outputs; with act-order
weight_g_idx [inputs]; weight_shape, [outputs, inputs]. W = scale * (q - zero point). Source: compressed-tensors
(compressors/pack_quantized, quantization/quant_args.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.core.errors import CheckpointError
from engine.core.layers import WEIGHT_SHARD_DIM
from engine.core.quant import LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant import quantization_config as quant_config
from engine.plugins.quant.conversions import instead_of
from engine.plugins.quant.groups import check_scales, group_of
from engine.plugins.quant.packing import WORD, unpack
from engine.plugins.quant.w4a16 import SCALE_DTYPES, GroupScheme, QuantizedWeight, Reader

BITS = (4, 8)
FORMAT = "pack-quantized"
STRATEGIES = ("group", "channel")


class PackedReader(Reader):
    """Reads the tensors of packed modules."""

    def __init__(self, weights: quant_config.QuantArgs) -> None:
        self._symmetric = weights.symmetric
        self.ordered = weights.actorder == "group"
        size = weights.group_size if weights.strategy == "group" else None
        self.scheme = GroupScheme(bits=weights.num_bits, group_size=size or -1)

    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """NAME.weight_packed, weight_scale; weight_zero_point if asymmetric; optional weight_shape and weight_g_idx."""
        inputs, outputs, bits = spec.in_features, part.out_features, self.scheme.bits
        groups = self.scheme.groups(inputs)
        shard_dim = WEIGHT_SHARD_DIM[spec.parallel]
        group_dim = shard_dim if shard_dim == 0 or (groups > 1 and not self.ordered) else None
        found = {
            f"{part.name}.weight_packed": TensorSpec(
                shape=(outputs, -(-inputs * bits // WORD)), dtypes=("int32",), shard_dim=shard_dim
            ),
            f"{part.name}.weight_scale": TensorSpec(shape=(outputs, groups), dtypes=SCALE_DTYPES, shard_dim=group_dim),
            f"{part.name}.weight_shape": TensorSpec(shape=(2,), dtypes=("int64", "int32"), optional=True),
            f"{part.name}.weight_g_idx": TensorSpec(
                shape=(-1,),
                dtypes=("int32", "int64"),
                shard_dim=0 if shard_dim == 1 else None,
                optional=not self.ordered,
            ),
        }
        if not self._symmetric:
            found[f"{part.name}.weight_zero_point"] = TensorSpec(
                shape=(-(-outputs * bits // WORD), groups), dtypes=("int32",), shard_dim=group_dim
            )
        return found

    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        name, bits = part.name, self.scheme.bits
        shape = loaded.get(f"{name}.weight_shape")
        expected = [part.out_features if part.stored_in is None else part.stored_in.size, spec.in_features]
        if shape is not None and shape.tolist() != expected:
            raise CheckpointError(
                f"tensor {name}.weight_shape says that the weight is {shape.tolist()}; the model expects {expected}"
            )
        packed = loaded[f"{name}.weight_packed"]
        inputs = min(packed.shape[1] * WORD // bits, spec.in_features)
        stored = loaded.get(f"{name}.weight_g_idx")
        group = group_of(f"{name}.weight_g_idx", stored, self.scheme, inputs, spec.in_features, ordered=self.ordered)
        scales = check_scales(f"{name}.weight_scale", loaded[f"{name}.weight_scale"]).T
        zeros = None
        if not self._symmetric:
            zeros = unpack(loaded[f"{name}.weight_zero_point"], bits, 0, packed.shape[0]).T
        return QuantizedWeight(values=unpack(packed, bits, 1, inputs), scales=scales, zeros=zeros, group_of=group)


def check_packed(scheme: quant_config.Scheme) -> None:
    """Raise CheckpointError for a scheme of packed weights with other bits, or with quantized activations."""
    weights = scheme.weights
    if scheme.inputs is not None:
        raise CheckpointError(
            f"the checkpoint's {scheme} quantizes activations too; use one with weights only (W4A16, W8A16):"
            f" {instead_of('llm-compressor')}"
        )
    if weights.type != "int" or weights.num_bits not in BITS or weights.strategy not in STRATEGIES:
        raise CheckpointError(
            f"the checkpoint's {scheme} is not supported: use weights of 4 or 8 bits, per channel or in groups:"
            f" {instead_of('llm-compressor')}"
        )
