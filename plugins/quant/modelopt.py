"""The modelopt method: checkpoints that NVIDIA ModelOpt has exported, in float8 or in 4 bits (W4A16_AWQ).

hf_quant_config.json describes the quantization; newer exports repeat most of it in config.json. Source: ModelOpt
(torch/export/quant_utils.py, unified_export_hf.py, convert_hf_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from attrs import frozen

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import WEIGHT_SHARD_DIM
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearPart, LinearSpec, QuantMethod, TensorSpec
from engine.plugins.quant.conversions import instead_of
from engine.plugins.quant.groups import check_scales
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme, ReadsKVCacheScheme
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys, quantization_file
from engine.plugins.quant.quantization_config import same_for_all, same_for_experts
from engine.plugins.quant.triton_refusal import triton_refusal
from engine.plugins.quant.w4_experts import w4_experts
from engine.plugins.quant.w4a16 import GroupScheme, QuantizedWeight, Reader
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w8_experts import w8_experts
from engine.plugins.quant.w8_kernel import STATIC, TOKEN, W8Format
from engine.plugins.quant.w8_kernels import W8Kernels
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls

FILE = "hf_quant_config.json"
BITS = 4
SIGN = 2 ** (BITS - 1)
SCALE_DTYPES = ("float32", "bfloat16", "float16")
FLOAT8_FORMATS = {
    "FP8": W8Format(
        dtype="float8_e4m3fn",
        granularity="tensor",
        activations=STATIC,
        scale_names=("weight_scale",),
        input_scale_names=("input_scale",),
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": W8Format(
        dtype="float8_e4m3fn",
        granularity="channel",
        activations=TOKEN,
        scale_names=("weight_scale",),
        scale_vector=True,
    ),
}
"""ModelOpt's name of an algorithm (quant_algo) -> the format."""
INT4 = "W4A16_AWQ"
ALGORITHMS = (*FLOAT8_FORMATS, INT4)
MIXED = "MIXED_PRECISION"
"""Each module has an algorithm of its own."""
FLOAT8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
CACHES: Mapping[str | None, Any] = {None: None, "FP8": FLOAT8_CACHE}
"""kv_cache_quant_algo -> the kv_cache_scheme of compressed-tensors."""
KEYS = QuantKeys(
    read=frozenset({"ignore", "kv_cache_scheme", "quant_algo", "quantization", "quantized_layers"}),
    without_effect=BY_PROGRAM | {"config_groups"},
)
"""Keys of quantization_config. Its config_groups repeat quant_algo."""
FILE_KEYS = QuantKeys(
    read=frozenset(
        {
            "exclude_modules",
            "group_size",
            "kv_cache_quant_algo",
            "pre_quant_scale",  # the tensors of this name are read where there are any
            "quant_algo",
            "quantized_layers",
        }
    ),
    neutral={"has_zero_point": (None, False)},
)
"""Keys of `quantization` in hf_quant_config.json, and of each of its quantized_layers."""


@frozen(kw_only=True)
class ModuleFormat:
    """How one module is quantized."""

    algorithm: str
    group_size: int | None
    """Inputs that share a scale, of INT4."""

    def __str__(self) -> str:
        return self.algorithm if self.group_size is None else f"{self.algorithm} in groups of {self.group_size}"


class ModelOptConfig:
    """The quantization of a checkpoint, read from both files."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config that is not ModelOpt's, unsupported or contradictory."""
        file = quantization_file(checkpoint, FILE)
        method = checkpoint.get("quant_method", None if file is None else "modelopt")
        if method != "modelopt":
            raise CheckpointError(f"the checkpoint's quant_method is {method!r}; this reads modelopt only")
        KEYS.check(checkpoint)
        details = _table(checkpoint.get("quantization") or (file or {}).get("quantization") or {}, "quantization")
        FILE_KEYS.check(details)
        self.details = details
        stated = [table["quant_algo"] for table in (checkpoint, details) if table.get("quant_algo")]
        if len(set(stated)) > 1:
            raise CheckpointError(
                f"config.json says that the weights are {stated[0]}, but {FILE} says {stated[1]}; fetch both again"
            )
        self.algorithm = stated[0] if stated else None
        self.excluded = _names(checkpoint, "ignore") + _names(details, "exclude_modules")
        layers = _table(details.get("quantized_layers") or checkpoint.get("quantized_layers") or {}, "quantized_layers")
        self.layers = {name: _format(_table(table, name), name) for name, table in layers.items()}
        cache = details.get("kv_cache_quant_algo")
        scheme = CACHES.get(cache, cache) or checkpoint.get("kv_cache_scheme")
        self.kv_cache = KVCacheScheme.parse({"kv_cache_scheme": scheme})
        self.default: ModuleFormat | None = None
        if self.algorithm == MIXED and not layers:
            raise CheckpointError(f"the weights are {MIXED}, but {FILE} has no quantized_layers; fetch it again")
        if self.algorithm != MIXED and (self.algorithm is not None or self.kv_cache.dtype is None):
            self.default = _format({**details, "quant_algo": self.algorithm}, FILE)

    def format(self, module: str) -> ModuleFormat | None:
        """How a module is quantized. None: it is not."""
        excluded = any(fnmatchcase(module, entry) or module.startswith(f"{entry}.") for entry in self.excluded)
        return None if excluded else self.layers.get(module, self.default)


class ModelOpt(ReadsKVCacheScheme, QuantMethod[None]):
    """Reads checkpoints that ModelOpt has exported."""

    api: ClassVar[str] = "2"

    def __init__(self, config: ModelOptConfig) -> None:
        self._config = config
        self._kv_cache = config.kv_cache
        self._w8 = W8Kernels("modelopt")
        self._matmuls = WeightOnlyMatmuls()

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses checkpoints of other methods and algorithms, and GPUs without Triton."""
        if checkpoint is None:
            return f"the checkpoint is not quantized; it needs one that ModelOpt has exported, with {FILE}"
        try:
            ModelOptConfig(checkpoint)
        except CheckpointError as error:
            return str(error)
        return triton_refusal(device)

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> ModelOpt:
        """Raises CheckpointError for a checkpoint that `refuses` refuses. Logs a warning if it has unknown keys, or
        asks for an unsupported KV cache."""
        config = ModelOptConfig(checkpoint or {})
        KEYS.warn_unknown(checkpoint or {})
        FILE_KEYS.warn_unknown(config.details)
        config.kv_cache.warn_unsupported()
        return cls(config)

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        return None if checkpoint is None else ModelOptConfig(checkpoint).kv_cache.dtype

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A W8 or W4A16 kernel. None for modules that the checkpoint leaves unquantized."""
        found = same_for_all(spec, self._config.format)
        if found is None:
            return None
        if found.algorithm in FLOAT8_FORMATS:
            return self._w8.make(spec, FLOAT8_FORMATS[found.algorithm])
        scheme = GroupScheme(bits=BITS, group_size=found.group_size or -1)
        return W4A16Kernel(spec, Int4Reader(scheme), self._matmuls)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        found = same_for_experts(spec, self._config.format)
        if found is None:
            return None
        if found.algorithm in FLOAT8_FORMATS:
            return w8_experts(spec, FLOAT8_FORMATS[found.algorithm])
        if spec.device != "cpu":
            raise CheckpointError(
                f"the experts {spec.name} are in W4A16_AWQ, whose inputs have factors of their own for each expert,"
                " which the kernels for GPUs do not compute; use a checkpoint with experts in FP8, or of another method"
            )
        scheme = GroupScheme(bits=BITS, group_size=found.group_size or -1)
        return w4_experts(spec, Int4Reader(scheme), self._matmuls)

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """As `linear`: ModelOpt quantizes the output layer unless it is excluded."""
        return self.linear(spec)


class Int4Reader(Reader):
    """Reads the tensors of W4A16_AWQ modules: signed integers of 4 bits, two outputs per byte, the even one first."""

    def __init__(self, scheme: GroupScheme) -> None:
        self.scheme = scheme

    def tensors(self, part: LinearPart, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """NAME.weight [outputs / 2, inputs], weight_scale [outputs, groups]; optional pre_quant_scale [inputs].

        Raises CheckpointError for an odd number of outputs.
        """
        inputs, outputs = spec.in_features, part.out_features
        if outputs % 2:
            raise CheckpointError(f"{part.name} has {outputs} outputs; {INT4} stores two in a byte")
        groups = self.scheme.groups(inputs)
        shard_dim = WEIGHT_SHARD_DIM[spec.parallel]
        group_dim = shard_dim if groups > 1 or shard_dim == 0 else None
        return {
            f"{part.name}.weight": TensorSpec(shape=(outputs // 2, inputs), dtypes=("uint8",), shard_dim=shard_dim),
            f"{part.name}.weight_scale": TensorSpec(shape=(outputs, groups), dtypes=SCALE_DTYPES, shard_dim=group_dim),
            f"{part.name}.pre_quant_scale": TensorSpec(
                shape=(inputs,), dtypes=SCALE_DTYPES, shard_dim=0 if shard_dim == 1 else None, optional=True
            ),
        }

    def read(self, part: LinearPart, spec: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        packed = loaded[f"{part.name}.weight"]
        values = torch.stack((packed & 15, packed >> BITS), 1).flatten(0, 1)
        factors = loaded.get(f"{part.name}.pre_quant_scale")
        return QuantizedWeight(
            values=values ^ SIGN,  # two's complement, with the zero point at SIGN
            scales=check_scales(f"{part.name}.weight_scale", loaded[f"{part.name}.weight_scale"]).T,
            zeros=None,
            group_of=None,
            input_factors=None if factors is None else check_scales(f"{part.name}.pre_quant_scale", factors),
        )


def _format(table: Mapping[str, Any], where: str) -> ModuleFormat:
    """Read an algorithm and its group size. Raises CheckpointError for an algorithm that is not computed here."""
    FILE_KEYS.check(table)
    algorithm = table.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{where}: the weights are quantized as {algorithm!r}; this reads {', '.join(ALGORITHMS)} and {MIXED} of"
            f" these: {instead_of('ModelOpt')}"
        )
    if algorithm != INT4:
        return ModuleFormat(algorithm=algorithm, group_size=None)
    group_size = table.get("group_size")
    if type(group_size) is not int or group_size < 1:
        raise CheckpointError(
            f"{where}: group_size of {INT4} is {group_size!r}; {FILE}, which has it, must be next to config.json"
        )
    return ModuleFormat(algorithm=algorithm, group_size=group_size)


def _table(found: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{FILE}: {name} is {found!r}, not a table")
    return found


def _names(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = table.get(key) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise CheckpointError(f"{key} of the checkpoint's quantization is {found!r}, not a list of names")
    return tuple(found)
