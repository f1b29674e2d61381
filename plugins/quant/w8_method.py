"""What the W8 methods, fp8 and int8, have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from attrs import evolve, field, frozen, validators

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError, ConfigError
from engine.core.quant import FLOAT8_CAPABILITY, KVScaleNames, LinearKernel, LinearSpec, QuantMethod
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme
from engine.plugins.quant.quantization_config import (
    CompressedConfig,
    Scheme,
    is_listed,
    same_for_all,
    unquantized_modules,
)
from engine.plugins.quant.rounding import BLOCK
from engine.plugins.quant.w8_cpu import DequantizeAtLoadKernel, IntegerKernel
from engine.plugins.quant.w8_kernel import (
    NONE,
    STATIC,
    TOKEN,
    Activations,
    Granularity,
    W8Dtype,
    W8Format,
    W8Kernel,
)

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul

log = logging.getLogger(__name__)

ACTIVATIONS: Mapping[str, Activations] = {"dynamic-token": TOKEN, "none": NONE}
"""By the values of the option."""
GRANULARITIES: Mapping[str, Granularity] = {"tensor": "tensor", "channel": "channel", "block": "block"}
"""By the names of compressed-tensors and of the option."""
STORED_FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
"""Formats of compressed-tensors that store quantized values unpacked, by type."""
DTYPES: Mapping[str, W8Dtype] = {"float": "float8_e4m3fn", "int": "int8"}


def one_of(*names: str) -> Any:
    """An optional setting with these values."""
    return field(default=None, validator=validators.optional(validators.in_(names)))


@frozen(kw_only=True)
class ActivationOptions:
    """Settings of both methods (quant.options)."""

    activations: str | None = one_of(*ACTIVATIONS)
    """dynamic-token or none. Not given: as the checkpoint says, and dynamic-token for an unquantized one."""


W8OptionsT = TypeVar("W8OptionsT", bound=ActivationOptions)


class W8Method(QuantMethod[W8OptionsT | None], Generic[W8OptionsT]):
    """Reads quantized weights and scales, or quantizes while loading."""

    api: ClassVar[str] = "2"
    name: ClassVar[str]

    def __init__(self, formats: FormatSource, kv_cache: KVCacheScheme) -> None:
        self._formats = formats
        self._kv_cache = kv_cache
        self._logged: set[str] = set()
        self._matmuls: dict[str, WeightOnlyMatmul] = {}

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """Parse a quantization_config. Raises CheckpointError for one that the method does not read."""

    @classmethod
    @abstractmethod
    def online(cls, options: W8OptionsT | None) -> W8Format:
        """The format that an unquantized checkpoint is quantized to."""

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses checkpoints quantized in another way, and GPUs without Triton."""
        if device.type == "cuda" and find_spec("triton") is None:
            return "its kernels for GPUs are written in Triton, which is not installed; install triton"
        if checkpoint is None:
            return None
        try:
            cls.read(checkpoint)
        except CheckpointError as error:
            return str(error)
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: W8OptionsT | None) -> W8Method[W8OptionsT]:
        """Raises CheckpointError for checkpoints that `refuses` refuses, ConfigError for options that contradict the
        checkpoint."""
        wanted = None if options is None else options.activations
        if checkpoint is None:
            form = cls.online(options)
            if wanted is not None:
                form = evolve(form, activations=ACTIVATIONS[wanted])
            return cls(OneFormat(form=form), KVCacheScheme())
        granularity = getattr(options, "granularity", None)
        if granularity is not None:
            raise ConfigError(
                f"quant.options granularity is {granularity!r}, but the checkpoint is quantized already; leave it out"
            )
        source = cls.read(checkpoint)
        if wanted is not None:
            source = Overridden(source=source, activations=ACTIVATIONS[wanted])
        kv_cache = KVCacheScheme.parse(checkpoint)
        kv_cache.warn_unsupported()
        return cls(source, kv_cache)

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        return KVCacheScheme.parse(checkpoint).dtype

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        return self._kv_cache.names(attention)

    def ignored(self) -> Sequence[str]:
        """KV cache scales under other names, or of an unsupported kind."""
        return self._kv_cache.ignored()

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A kernel for the device. None for modules that the checkpoint leaves unquantized."""
        form = same_for_all(spec, self._formats.format)
        if form is None:
            return None
        kernel = self._kernel(spec, form)
        self._log_once(kernel, form)
        return kernel

    def _kernel(self, spec: LinearSpec, form: W8Format) -> W8Kernel:
        if spec.device == "cpu":
            integers = form.dtype == "int8" and form.activations != NONE
            return IntegerKernel(spec, form) if integers else DequantizeAtLoadKernel(spec, form)
        from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
        from engine.plugins.quant.w8_gpu import DequantizeEachCallKernel, W8GpuKernel
        from engine.plugins.quant.w8a8_matmul import has_capability

        device = torch.device(spec.device)
        if spec.device not in self._matmuls:
            self._matmuls[spec.device] = WeightOnlyMatmul(device)
        can = form.dtype == "int8" or has_capability(device, FLOAT8_CAPABILITY)
        return (W8GpuKernel if can else DequantizeEachCallKernel)(spec, form, self._matmuls[spec.device])

    def _log_once(self, kernel: W8Kernel, form: W8Format) -> None:
        """Log how layers compute, once per kind of layer."""
        text, slow = f"{form}: {kernel.describe()}", kernel.slow()
        where = f"(first: {kernel.spec.parts[0].name})"
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s %s", text, where)
        if slow is not None and slow not in self._logged:
            self._logged.add(slow)
            log.warning("%s will be slow: %s %s", self.name, slow, where)


class FormatSource(ABC):
    """Says how each module of a checkpoint is quantized."""

    @abstractmethod
    def format(self, module: str) -> W8Format | None:
        """The module's format. None: it is not quantized."""


@frozen(kw_only=True)
class OneFormat(FormatSource):
    """One format for all modules except the unquantized ones."""

    form: W8Format
    unquantized: tuple[str, ...] = ()

    @classmethod
    def parse(cls, form: W8Format, config: Mapping[str, Any]) -> OneFormat:
        """Read the list of unquantized modules from a quantization_config."""
        return cls(form=form, unquantized=unquantized_modules(config))

    def format(self, module: str) -> W8Format | None:
        return None if is_listed(module, self.unquantized) else self.form


@frozen(kw_only=True)
class Overridden(FormatSource):
    """Another source, with activations overridden by an option."""

    source: FormatSource
    activations: Activations

    def format(self, module: str) -> W8Format | None:
        form = self.source.format(module)
        return None if form is None else evolve(form, activations=self.activations)


@frozen(kw_only=True)
class CompressedFormats(FormatSource):
    """One format per config group of compressed-tensors."""

    config: CompressedConfig
    formats: Mapping[str, W8Format]
    """By name of the group."""

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> CompressedFormats:
        """Raises CheckpointError, naming the group, for one whose weights are not 8-bit and unpacked."""
        config = CompressedConfig.parse(stored)
        return cls(config=config, formats={scheme.name: format_of(scheme) for scheme in config.schemes})

    def format(self, module: str) -> W8Format | None:
        scheme = self.config.scheme(module)
        return None if scheme is None else self.formats[scheme.name]

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of the weights of all groups."""
        return frozenset(form.dtype for form in self.formats.values())


def format_of(scheme: Scheme) -> W8Format:
    """The format of a config group. Raises CheckpointError unless the weights are 8-bit and unpacked."""
    weights, inputs = scheme.weights, scheme.inputs
    whys = {
        f"its weights have {weights.num_bits} bits, not 8": weights.num_bits != 8,
        f"its weights are of type {weights.type!r}": weights.type not in DTYPES,
        "its weights are asymmetric": not weights.symmetric,
        f"its format is {scheme.format!r}, not {' or '.join(STORED_FORMATS.get(weights.type, ()))}": (
            scheme.format not in STORED_FORMATS.get(weights.type, ())
        ),
        f"its weights have scales per {weights.strategy}, not per tensor, channel or block": (
            weights.strategy not in GRANULARITIES
        ),
        f"its blocks are {weights.block}, not {BLOCK} x {BLOCK}": (
            weights.strategy == "block" and weights.block != (BLOCK, BLOCK)
        ),
        "blocks are supported for float weights only": weights.strategy == "block" and weights.type == "int",
    }
    if inputs is not None:
        grouped = inputs.strategy == "group"
        whys |= {
            f"its activations are {inputs}, and its weights {weights}": (
                inputs.num_bits != 8 or inputs.type != weights.type
            ),
            "its activations are asymmetric": not inputs.symmetric,
            f"its activations have scales per {inputs.strategy}": inputs.strategy not in ("tensor", "token", "group"),
            f"its activations have scales per group of {inputs.group_size}, its weights per {weights.strategy}": (
                grouped and (weights.strategy != "block" or inputs.group_size != BLOCK)
            ),
            f"its activations have stored scales per {inputs.strategy}, not per tensor": (
                not inputs.dynamic and inputs.strategy != "tensor"
            ),
            "its weights have blocks and its activations one stored scale": (
                not inputs.dynamic and weights.strategy == "block"
            ),
        }
    for why, applies in whys.items():
        if applies:
            raise CheckpointError(f"config group {scheme} of quantization_config is not supported here: {why}")
    activations = NONE if inputs is None else TOKEN if inputs.dynamic else STATIC
    return W8Format(
        dtype=DTYPES[weights.type],
        granularity=GRANULARITIES[weights.strategy],
        activations=activations,
        scale_names=("weight_scale",),
        input_scale_names=("input_scale",) if activations == STATIC else (),
    )
