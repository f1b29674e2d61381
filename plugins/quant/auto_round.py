"""The auto-round method: checkpoints in AutoRound's own format, weights of 4 or 8 bits packed as GPTQ or AWQ does.

`packing_format` says which tensors a module has. Modules outside `block_name_to_quantize` are not quantized unless
`extra_config` names them; `extra_config` also overrides settings, per module name or regular expression. Source:
AutoRound (export/export_to_autoround/export.py, inference/convert_model.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearSpec
from engine.plugins.quant.awq import BITS as AWQ_BITS, AwqReader
from engine.plugins.quant.conversions import instead_of
from engine.plugins.quant.gptq import BITS, GptqConfig, GptqReader
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys, require_method
from engine.plugins.quant.quantization_config import (
    flat_names,
    is_listed,
    same_for_all,
    same_for_experts,
    unquantized_modules,
)
from engine.plugins.quant.w4_experts import w4_experts
from engine.plugins.quant.w4a16 import GroupScheme, Reader, check_group_size
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w4a16_method import W4A16Method

ALIASES = ("auto_round", "intel/auto-round")
"""Other names of the quant_method."""
GPTQ_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq")
GPTQ = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")
AWQ = ("auto_round:auto_awq", "auto_round:awq")
PACKINGS = (*GPTQ_LESS_ONE, *GPTQ, *AWQ)
UNQUANTIZED_BITS = 16
"""From this number of bits on, a module is not quantized."""
SETTINGS = frozenset({"bits", "group_size", "sym"})
"""Keys of a module's settings that the method uses."""
NEUTRAL = {
    "act_bits": (None, 16, 32),
    "data_type": (None, "int"),
    "super_bits": (None,),
    "super_group_size": (None,),
}
"""Keys of a module's settings -> the accepted values: integer weights with scales, and activations as they are."""
OF_ACTIVATIONS = frozenset({"act_data_type", "act_dynamic", "act_group_size", "act_sym"})
"""Keys that say nothing where activations are not quantized."""


@frozen(kw_only=True)
class ModuleSettings:
    """How one module is quantized."""

    bits: int
    group_size: int
    symmetric: bool

    def __str__(self) -> str:
        scheme = GroupScheme(bits=self.bits, group_size=self.group_size)
        return f"auto-round of {scheme}{'' if self.symmetric else ', asymmetric'}"


class AutoRound(W4A16Method):
    """Reads checkpoints in AutoRound's own format."""

    reads: ClassVar[str] = "with quant_method auto-round in config.json"
    keys: ClassVar[QuantKeys] = QuantKeys(
        read=frozenset(
            {
                *SETTINGS,
                "block_name_to_quantize",
                "extra_config",
                "modules_to_not_convert",
                "packing_format",
                "to_quant_block_names",
            }
        ),
        neutral={
            **NEUTRAL,
            "rotation_config": (None, {}),
            "rotation_configs": (None, []),
            "static_attention_dtype": (None,),
            "static_kv_dtype": (None,),
        },
        without_effect=BY_PROGRAM
        | OF_ACTIVATIONS
        | {
            "amp",
            "autoround_version",
            "damp_percent",
            "desc_act",
            "enable_minmax_tuning",
            "enable_norm_bias_tuning",
            "enable_quanted_input",
            "gradient_accumulate_steps",
            "iters",
            "low_gpu_mem_usage",
            "lr",
            "minmax_lr",
            "nsamples",
            "quant_block_list",
            "scale_dtype",
            "seqlen",
            "static_attention_granularity",
            "static_kv_granularity",
            "supported_types",
            "true_sequential",
        },
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config that is not AutoRound's or not supported."""
        super().__init__(config)
        require_method(config, "auto-round", ALIASES)
        self._packing = str(config.get("packing_format") or GPTQ_LESS_ONE[0])
        if self._packing not in PACKINGS:
            raise CheckpointError(
                f"the checkpoint's packing_format is {self._packing!r}; this reads {', '.join(PACKINGS)}:"
                f" {instead_of('AutoRound')}"
            )
        standard = ModuleSettings(bits=4, group_size=128, symmetric=True)
        self._default = self._settings(config, "quantization_config", standard)
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
        if isinstance(blocks, str):
            blocks = [name.strip() for name in blocks.split(",")]
        self._blocks = tuple(flat_names({"block_name_to_quantize": blocks}, "block_name_to_quantize"))
        self._unquantized = unquantized_modules(config)
        extra = config.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"quantization_config: extra_config is {extra!r}, not a table")
        default = self._default or standard
        self._extra = {
            name: self._settings(table, f"extra_config {name}", default) for name, table in extra.items() if table
        }
        self._patterns = [(pattern, name) for name in self._extra if (pattern := _pattern(name)) is not None]

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A W4A16 kernel. None for modules that the checkpoint leaves unquantized."""
        settings = same_for_all(spec, self.settings_of)
        return None if settings is None else W4A16Kernel(spec, self._reader(settings), self._matmuls)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        settings = same_for_experts(spec, self.settings_of)
        return None if settings is None else w4_experts(spec, self._reader(settings), self._matmuls)

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """As `linear`, where extra_config names the output layer."""
        return self.linear(spec) if spec.parts[0].name in self._extra else None

    def settings_of(self, name: str) -> ModuleSettings | None:
        """How a module is quantized. None: it is not."""
        if name in self._extra:
            return self._extra[name]
        if is_listed(name, self._unquantized):
            return None
        for pattern, key in self._patterns:
            if pattern.search(name):
                return self._extra[key]
        in_blocks = not self._blocks or name.startswith(self._blocks)
        return self._default if in_blocks else None

    def _reader(self, settings: ModuleSettings) -> Reader:
        scheme = GroupScheme(bits=settings.bits, group_size=settings.group_size)
        if self._packing in AWQ:
            return AwqReader(scheme)
        less_one = self._packing in GPTQ_LESS_ONE
        return GptqReader(GptqConfig(scheme=scheme, symmetric=settings.symmetric, less_one=less_one, ordered=False))

    def _settings(self, table: Any, where: str, default: ModuleSettings) -> ModuleSettings | None:
        """Parse the settings of a module; `default` has those that the table lacks. None: it is not quantized."""
        if not isinstance(table, Mapping):
            raise CheckpointError(f"quantization_config: {where} is {table!r}, not a table")
        bits, group_size = table.get("bits") or default.bits, table.get("group_size") or default.group_size
        if type(bits) is int and bits >= UNQUANTIZED_BITS:
            return None
        QuantKeys(read=frozenset(), neutral=NEUTRAL).check(table)
        accepted = (AWQ_BITS,) if self._packing in AWQ else BITS
        if bits not in accepted:
            raise CheckpointError(
                f"{where}: the weights have {bits!r} bits; use a checkpoint with {' or '.join(map(str, accepted))}:"
                f" {instead_of('AutoRound')}"
            )
        symmetric = table.get("sym")
        return ModuleSettings(
            bits=bits,
            group_size=check_group_size(group_size, where),
            symmetric=default.symmetric if symmetric is None else bool(symmetric),
        )


def _pattern(name: str) -> re.Pattern[str] | None:
    """A key of extra_config as a regular expression. None: it is only a name, as AutoRound reads it."""
    try:
        return re.compile(name)
    except re.error:
        return None
