"""The awq method: AWQ checkpoints (version gemm), 4-bit weights in groups of inputs, packed along outputs.

A module has qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8], int32, in AWQ_ORDER; scales [groups,
outputs]. W = scales * (q - zero point). Source: AutoAWQ (modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from engine.core.errors import CheckpointError
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.groups import check_scales
from engine.plugins.quant.packing import AWQ_ORDER, unpack_awq
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys, require_method, with_file
from engine.plugins.quant.quantization_config import is_listed, same_for_all, same_for_experts, unquantized_modules
from engine.plugins.quant.w4_experts import w4_experts
from engine.plugins.quant.w4a16 import SCALE_DTYPES, GroupScheme, QuantizedWeight, Reader, check_group_size
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w4a16_method import W4A16Method

FILE = "quant_config.json"
"""File in which older programs describe the quantization, instead of in config.json."""
BITS = 4
PACK = len(AWQ_ORDER)


class Awq(W4A16Method):
    """Reads AWQ checkpoints."""

    reads: ClassVar[str] = "with quant_method awq in config.json"
    keys: ClassVar[QuantKeys] = QuantKeys(
        read=frozenset(
            {"bits", "format", "group_size", "modules_to_not_convert", "q_group_size", "version", "w_bit", "zero_point"}
        ),
        without_effect=BY_PROGRAM | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse"},
    )

    @classmethod
    def settings(cls, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_file(checkpoint, FILE, "awq")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config that is not AWQ's or not supported."""
        super().__init__(config)
        require_method(config, "awq")
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise CheckpointError(
                f"the checkpoint's awq version is {version!r}; use one of version gemm, which AutoAWQ writes by default"
            )
        bits = config.get("bits", config.get("w_bit", BITS))
        if bits != BITS:
            raise CheckpointError(f"the checkpoint's weights have {bits!r} bits; awq has {BITS}")
        group_size = config.get("group_size", config.get("q_group_size", 128))
        self._scheme = GroupScheme(bits=BITS, group_size=check_group_size(group_size, "quantization_config"))
        self._unquantized = unquantized_modules(config)

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A W4A16 kernel. None for modules that the checkpoint leaves unquantized."""
        scheme = same_for_all(spec, lambda name: None if is_listed(name, self._unquantized) else self._scheme)
        return None if scheme is None else W4A16Kernel(spec, AwqReader(scheme), self._matmuls)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        scheme = same_for_experts(spec, lambda name: None if is_listed(name, self._unquantized) else self._scheme)
        return None if scheme is None else w4_experts(spec, AwqReader(scheme), self._matmuls)


class AwqReader(Reader):
    """Reads the tensors of AWQ modules."""

    def __init__(self, scheme: GroupScheme) -> None:
        self.scheme = scheme

    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """NAME.qweight, qzeros, scales. Raises CheckpointError for a number of outputs that does not fill whole
        words."""
        inputs, outputs = spec.in_features, part.out_features
        if outputs % PACK:
            raise CheckpointError(f"{part.name} has {outputs} outputs; awq packs {PACK} in a word")
        groups = self.scheme.groups(inputs)
        shard_dim = {"none": None, "column": 1, "row": 0}[spec.parallel]
        group_dim = shard_dim if groups > 1 or shard_dim == 1 else None
        return {
            f"{part.name}.qweight": TensorSpec(shape=(inputs, outputs // PACK), dtypes=("int32",), shard_dim=shard_dim),
            f"{part.name}.qzeros": TensorSpec(shape=(groups, outputs // PACK), dtypes=("int32",), shard_dim=group_dim),
            f"{part.name}.scales": TensorSpec(shape=(groups, outputs), dtypes=SCALE_DTYPES, shard_dim=group_dim),
        }

    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        packed = loaded[f"{part.name}.qweight"]
        return QuantizedWeight(
            values=unpack_awq(packed).T,
            scales=check_scales(f"{part.name}.scales", loaded[f"{part.name}.scales"]),
            zeros=unpack_awq(loaded[f"{part.name}.qzeros"]),
            group_of=None,
        )
