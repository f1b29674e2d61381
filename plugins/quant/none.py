"""No quantization: every linear layer keeps its weights in the model's own type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.quant import KVScaleNames, LinearKernel, LinearSpec, QuantMethod
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme


class Unquantized(QuantMethod[None]):
    """Reads checkpoints whose weights are plain float32, bfloat16 or float16; scales of the KV cache they may have."""

    api: ClassVar[str] = "1"

    def __init__(self, kv_cache: KVCacheScheme) -> None:
        self._kv_cache = kv_cache

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """A checkpoint that names a quantization method needs a plugin that reads it."""
        if checkpoint is None or is_kv_cache_alone(checkpoint):
            return None
        method = checkpoint.get("quant_method", "of an unnamed method")
        return (
            f"the checkpoint's weights are quantized ({method}), and this reads only unquantized ones; choose the"
            f" plugin for {method} with --quant (engine plugins list shows those installed), or an unquantized"
            " checkpoint of the model"
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> Unquantized:
        """Only what it says of the KV cache. Raises CheckpointError for what `refuses` refuses."""
        if checkpoint is not None and not is_kv_cache_alone(checkpoint):
            raise CheckpointError("a checkpoint with a quantization_config cannot be read as an unquantized one")
        kv_cache = KVCacheScheme.parse(checkpoint)
        kv_cache.say()
        return cls(kv_cache)

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """None for all: core's own kernel multiplies by the weights as they are."""
        return None

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        """By kv_cache_scheme."""
        return KVCacheScheme.parse(checkpoint).dtype

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        """See QuantMethod."""
        return self._kv_cache.names(attention)

    def ignored(self) -> Sequence[str]:
        """Scales of a quantized KV cache under other names, or of a kind that is not supported."""
        return self._kv_cache.ignored()


def is_kv_cache_alone(config: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors describes a KV cache and no weights."""
    return (
        config.get("quant_method") == "compressed-tensors"
        and not config.get("config_groups")
        and bool(config.get("kv_cache_scheme"))
    )
