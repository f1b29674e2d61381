"""The gptq method: GPTQ checkpoints, weights of 4 or 8 bits in groups of inputs, with or without act-order.

A module has qweight [inputs * bits / 32, outputs] and qzeros [groups, outputs * bits / 32], int32, lowest field first;
scales [groups, outputs]; g_idx [inputs], the group of each input. W = scales * (q - zero point). Format "gptq" stores
zero points minus one, "gptq_v2" as they are. Source: AutoGPTQ and GPTQModel (nn_modules/qlinear/__init__.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen

from engine.core.errors import CheckpointError
from engine.core.layers import BIAS_SHARD_DIM
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.groups import check_scales, group_of
from engine.plugins.quant.packing import WORD, gptq_zeros, unpack
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys, require_method, with_file
from engine.plugins.quant.quantization_config import (
    flat_names,
    is_listed,
    same_for_all,
    same_for_experts,
    unquantized_modules,
)
from engine.plugins.quant.w4_experts import w4_experts
from engine.plugins.quant.w4a16 import SCALE_DTYPES, GroupScheme, QuantizedWeight, Reader, check_group_size
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w4a16_method import W4A16Method

FILE = "quantize_config.json"
"""File in which older programs describe the quantization, instead of in config.json."""
BITS = (4, 8)
LESS_ONE = {"gptq": True, "gptq_v2": False}
"""checkpoint_format -> whether zero points are stored minus one."""
LAYERS = "layers"
"""Name of the module that contains the decoder layers, to which alone modules_in_block_to_quantize applies."""
LEFT_ALONE, OVERRIDDEN = "-:", "+:"
"""Prefixes of a pattern in `dynamic`: leave unquantized, override. No prefix means override."""


@frozen(kw_only=True)
class GptqConfig:
    """How one module is quantized, or all modules that `dynamic` does not name."""

    scheme: GroupScheme
    symmetric: bool
    less_one: bool
    ordered: bool
    """Act-order (desc_act): whether inputs are assigned to groups in another order than their own."""

    def __str__(self) -> str:
        return f"gptq of {self.scheme}{'' if self.symmetric else ', asymmetric'}"


class Gptq(W4A16Method):
    """Reads GPTQ checkpoints."""

    reads: ClassVar[str] = "with quant_method gptq in config.json"
    keys: ClassVar[QuantKeys] = QuantKeys(
        read=frozenset(
            {
                "bits",
                "checkpoint_format",
                "desc_act",
                "dynamic",
                "format",
                "group_size",
                "lm_head",
                "modules_in_block_to_quantize",
                "modules_to_not_convert",
                "q_group_size",
                "sym",
                "w_bit",
                "wbits",
            }
        ),
        neutral={
            "activation": (None,),
            "adapter": (None,),
            "is_marlin_format": (None, False),
            "pack_dtype": (None, "int32"),
            "rotation": (None,),
        },
        without_effect=BY_PROGRAM
        | {
            # how weights were rounded
            "act_group_aware",
            "block_name_to_quantize",
            "damp_auto_increment",
            "damp_percent",
            "group_aware",
            "hyb_act",
            "model_seqlen",
            "module_name_preceding_first_block",
            "mse",
            "quantizer",
            "static_groups",
            "true_sequential",
            "v2",
            # how another program runs
            "cache_block_outputs",
            "disable_exllama",
            "pad_token_id",
            "use_cuda_fp16",
        },
    )

    @classmethod
    def settings(cls, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_file(checkpoint, FILE, "gptq")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config that is not GPTQ's or not supported."""
        super().__init__(config)
        require_method(config, "gptq")
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if stored not in LESS_ONE:
            raise CheckpointError(
                f"the checkpoint's checkpoint_format is {stored!r}; this reads {' and '.join(LESS_ONE)}"
            )
        scheme = GroupScheme(bits=4, group_size=128)
        self._default = GptqConfig(scheme=scheme, symmetric=True, less_one=LESS_ONE[stored], ordered=False)
        self._default = self._read(config, "quantization_config")
        self._unquantized = unquantized_modules(config)
        self._quantizes_head = bool(config.get("lm_head"))
        self._quantized = tuple(flat_names(config, "modules_in_block_to_quantize"))
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise CheckpointError(f"quantization_config: dynamic is {dynamic!r}, not a table")
        self._dynamic = {
            pattern: None if pattern.startswith(LEFT_ALONE) else self._read(table, f"dynamic {pattern}")
            for pattern, table in dynamic.items()
        }
        self._patterns = {pattern: _compile(pattern) for pattern in dynamic}

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A W4A16 kernel. None for modules that the checkpoint leaves unquantized."""
        config = same_for_all(spec, self.config_of)
        return None if config is None else W4A16Kernel(spec, GptqReader(config), self._matmuls)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        config = same_for_experts(spec, self.config_of)
        return None if config is None else w4_experts(spec, GptqReader(config), self._matmuls)

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """As `linear`, where quantization_config has lm_head: true."""
        return self.linear(spec) if self._quantizes_head else None

    def config_of(self, name: str) -> GptqConfig | None:
        """How a module is quantized. None: it is not."""
        if is_listed(name, self._unquantized):
            return None
        if self._quantized and f".{LAYERS}." in name and not is_listed(name, self._quantized):
            return None
        for pattern, config in self._dynamic.items():
            if self._patterns[pattern].match(name):
                return config
        return self._default

    def _read(self, table: Any, where: str) -> GptqConfig:
        """Parse a table of settings; the defaults have those that it lacks."""
        if not isinstance(table, Mapping):
            raise CheckpointError(f"quantization_config: {where} is {table!r}, not a table")
        default = self._default
        bits = table.get("bits", table.get("w_bit", table.get("wbits", default.scheme.bits)))
        group_size = table.get("group_size", table.get("q_group_size", default.scheme.group_size))
        if bits not in BITS:
            raise CheckpointError(
                f"{where}: the weights have {bits!r} bits; use a checkpoint with {' or '.join(map(str, BITS))}"
            )
        return evolve(
            default,
            scheme=GroupScheme(bits=bits, group_size=check_group_size(group_size, where)),
            symmetric=bool(table.get("sym", default.symmetric)),
            ordered=bool(table.get("desc_act", default.ordered)),
        )


class GptqReader(Reader):
    """Reads the tensors of GPTQ modules."""

    def __init__(self, config: GptqConfig) -> None:
        self.config = config
        self.scheme = config.scheme
        self.ordered = config.ordered

    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """NAME.qweight, qzeros, scales; optional g_idx, and a bias where the model has none."""
        inputs, outputs, bits = spec.in_features, part.out_features, self.scheme.bits
        groups = self.scheme.groups(inputs)
        packed_dim = {"none": None, "column": 1, "row": 0}[spec.parallel]
        group_dim = packed_dim if packed_dim == 1 or (groups > 1 and not self.ordered) else None
        found = {
            f"{part.name}.qweight": TensorSpec(
                shape=(-(-inputs * bits // WORD), outputs), dtypes=("int32",), shard_dim=packed_dim
            ),
            f"{part.name}.qzeros": TensorSpec(
                shape=(groups, -(-outputs * bits // WORD)), dtypes=("int32",), shard_dim=group_dim
            ),
            f"{part.name}.scales": TensorSpec(shape=(groups, outputs), dtypes=SCALE_DTYPES, shard_dim=group_dim),
            f"{part.name}.g_idx": TensorSpec(
                shape=(-1,), dtypes=("int32", "int64"), shard_dim=0 if packed_dim == 0 else None, optional=True
            ),
        }
        if not spec.bias:
            found[f"{part.name}.bias"] = TensorSpec(
                shape=(outputs,), dtypes=SCALE_DTYPES, shard_dim=BIAS_SHARD_DIM[spec.parallel], optional=True
            )
        return found

    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Read a part. Also raises CheckpointError for a nonzero bias where the model has none."""
        name, bits = part.name, self.scheme.bits
        bias = None if spec.bias else loaded.get(f"{name}.bias")
        if bias is not None and bool(bias.any()):
            raise CheckpointError(
                f"tensor {name}.bias is not 0, but the model has no bias there; use a checkpoint without it"
            )
        scales = check_scales(f"{name}.scales", loaded[f"{name}.scales"])
        packed = loaded[f"{name}.qweight"]
        inputs = min(packed.shape[0] * WORD // bits, spec.in_features)
        stored = loaded.get(f"{name}.g_idx")
        group = group_of(f"{name}.g_idx", stored, self.scheme, inputs, spec.in_features, ordered=self.ordered)
        outputs = packed.shape[1]
        return QuantizedWeight(
            values=unpack(packed, bits, 0, inputs).T,
            scales=scales,
            zeros=gptq_zeros(
                loaded[f"{name}.qzeros"], bits, outputs, less_one=self.config.less_one, symmetric=self.config.symmetric
            ),
            group_of=group,
        )


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(LEFT_ALONE).removeprefix(OVERRIDDEN))
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is no regular expression: {error}") from error
