"""The compressed-tensors method: checkpoints with packed weights of 4 or 8 bits, alone or mixed with 8-bit formats.

The fp8 and int8 methods read checkpoints in which no group of modules is packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from engine.core.errors import CheckpointError
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearSpec
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme, ReadsKVCacheScheme
from engine.plugins.quant.pack_quantized import FORMAT, PackedReader, check_packed
from engine.plugins.quant.quant_keys import QuantKeys, require_method
from engine.plugins.quant.quantization_config import (
    COMPRESSED_KEYS,
    CompressedConfig,
    Scheme,
    same_for_all,
    same_for_experts,
)
from engine.plugins.quant.w4_experts import w4_experts
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.w4a16_method import W4A16Method
from engine.plugins.quant.w8_experts import w8_experts
from engine.plugins.quant.w8_formats import format_of
from engine.plugins.quant.w8_kernel import W8Format
from engine.plugins.quant.w8_kernels import W8Kernels


class CompressedTensors(ReadsKVCacheScheme, W4A16Method):
    """Reads checkpoints of format pack-quantized, and of mixed-precision with packed groups."""

    reads: ClassVar[str] = "that llm-compressor has packed (W4A16, W8A16)"
    keys: ClassVar[QuantKeys] = COMPRESSED_KEYS

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config of another method, or an unsupported one."""
        super().__init__(config)
        require_method(config, "compressed-tensors")
        self._config = CompressedConfig.parse(config)
        schemes = self._config.schemes
        if not any(scheme.format == FORMAT for scheme in schemes):
            raise CheckpointError(
                f"the checkpoint's format is {schemes[0].format!r} ({schemes[0]}); this reads {FORMAT}, alone or with"
                " groups of others; leave --quant out, and a method that reads the checkpoint is chosen if there is one"
            )
        self._unpacked = {scheme.name: form for scheme in schemes if (form := _unpacked(scheme)) is not None}
        self._w8 = W8Kernels("compressed-tensors")
        self._kv_cache = KVCacheScheme.parse(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> Self:
        """As W4A16Method.from_checkpoint. Logs a warning if the checkpoint asks for an unsupported KV cache."""
        found = super().from_checkpoint(checkpoint, options)
        found._kv_cache.warn_unsupported()
        return found

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """A W4A16 or W8 kernel. None for modules that the checkpoint leaves unquantized."""
        scheme = same_for_all(spec, self._config.scheme)
        if scheme is None:
            return None
        if scheme.name in self._unpacked:
            return self._w8.make(spec, self._unpacked[scheme.name])
        return W4A16Kernel(spec, PackedReader(scheme.weights), self._matmuls)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for experts that the checkpoint leaves unquantized."""
        scheme = same_for_experts(spec, self._config.scheme)
        if scheme is None:
            return None
        if scheme.name in self._unpacked:
            return w8_experts(spec, self._unpacked[scheme.name])
        return w4_experts(spec, PackedReader(scheme.weights), self._matmuls)

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """As `linear`: the targets and `ignore` cover the output layer too."""
        return self.linear(spec)


def _unpacked(scheme: Scheme) -> W8Format | None:
    """The format of a group that is not packed. None: it is packed. Raises CheckpointError for an unsupported one."""
    if scheme.format == FORMAT:
        check_packed(scheme)
        return None
    return format_of(scheme)
