"""Base of the W8 methods, fp8 and int8."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from attrs import evolve, field, frozen, validators

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError, ConfigError
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearSpec, QuantMethod
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme, ReadsKVCacheScheme
from engine.plugins.quant.quant_keys import QuantKeys
from engine.plugins.quant.quantization_config import COMPRESSED_KEYS, same_for_all, same_for_experts
from engine.plugins.quant.triton_refusal import triton_refusal
from engine.plugins.quant.w8_experts import w8_experts
from engine.plugins.quant.w8_formats import FormatSource, OneFormat, Overridden
from engine.plugins.quant.w8_kernel import NONE, TOKEN, Activations, W8Format
from engine.plugins.quant.w8_kernels import W8Kernels

ACTIVATIONS: Mapping[str, Activations] = {"dynamic-token": TOKEN, "none": NONE}
"""Value of the option -> how activations are quantized."""


def one_of(*names: str) -> Any:
    """An optional setting with these values."""
    return field(default=None, validator=validators.optional(validators.in_(names)))


@frozen(kw_only=True)
class ActivationOptions:
    """Settings of both methods (quant.options)."""

    activations: str | None = one_of(*ACTIVATIONS)
    """dynamic-token or none. Not given: as the checkpoint says, and dynamic-token for an unquantized one."""


def other_method(name: object) -> CheckpointError:
    """The error of a checkpoint that another quantization method has quantized."""
    return CheckpointError(
        f"the checkpoint's weights are quantized by {name!r} already, and quantizing them again would only lose"
        " precision; leave --quant out to use the plugin made for it, or take an unquantized checkpoint"
    )


W8OptionsT = TypeVar("W8OptionsT", bound=ActivationOptions)


class W8Method(ReadsKVCacheScheme, QuantMethod[W8OptionsT | None], Generic[W8OptionsT]):
    """Reads quantized weights and scales, or quantizes while loading."""

    api: ClassVar[str] = "2"
    name: ClassVar[str]

    def __init__(self, formats: FormatSource, kv_cache: KVCacheScheme) -> None:
        self._formats = formats
        self._kv_cache = kv_cache
        self._kernels = W8Kernels(self.name)

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> FormatSource:
        """Parse a quantization_config. Raises CheckpointError for one that the method does not read."""

    @classmethod
    def keys(cls, checkpoint: Mapping[str, Any]) -> QuantKeys:
        """The keys that a quantization_config which `read` reads may have."""
        return COMPRESSED_KEYS

    @classmethod
    @abstractmethod
    def online(cls, options: W8OptionsT | None) -> W8Format:
        """The format that an unquantized checkpoint is quantized to."""

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses checkpoints quantized in another way, and GPUs without Triton."""
        refusal = triton_refusal(device)
        if refusal is not None or checkpoint is None:
            return refusal
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
        cls.keys(checkpoint).warn_unknown(checkpoint)
        kv_cache = KVCacheScheme.parse(checkpoint)
        kv_cache.warn_unsupported()
        return cls(source, kv_cache)

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A kernel for the device. None for modules that the checkpoint leaves unquantized."""
        form = same_for_all(spec, self._formats.format)
        return None if form is None else self._kernels.make(spec, form)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        form = same_for_experts(spec, self._formats.format)
        return None if form is None else w8_experts(spec, form)

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """As `linear`, for checkpoints whose configuration names the output layer."""
        return self.linear(spec) if self._formats.has_lm_head else None
