"""The none method: every linear layer keeps its weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.quant import LinearKernel, LinearSpec, QuantMethod
from engine.plugins.quant.conversions import advice
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme, ReadsKVCacheScheme


class Unquantized(ReadsKVCacheScheme, QuantMethod[None]):
    """Reads checkpoints with float32, bfloat16 or float16 weights, and perhaps KV cache scales."""

    api: ClassVar[str] = "2"

    def __init__(self, kv_cache: KVCacheScheme) -> None:
        self._kv_cache = kv_cache

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses checkpoints that name a quantization method."""
        if checkpoint is None or is_kv_cache_alone(checkpoint):
            return None
        method = checkpoint.get("quant_method", "of an unnamed method")
        return (
            f"the checkpoint's weights are quantized ({method}), and this reads only unquantized ones; choose the"
            f" plugin for {method} with --quant (engine plugins list shows those installed), or an unquantized"
            f" checkpoint of the model{advice(method)}"
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> Unquantized:
        """Parse what the checkpoint says about the KV cache. Raises CheckpointError for what `refuses` refuses."""
        if checkpoint is not None and not is_kv_cache_alone(checkpoint):
            raise CheckpointError("a checkpoint with a quantization_config cannot be read as an unquantized one")
        kv_cache = KVCacheScheme.parse(checkpoint)
        kv_cache.warn_unsupported()
        return cls(kv_cache)

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """None: core's own kernel multiplies by the weights as they are."""
        return None


def is_kv_cache_alone(config: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors describes a KV cache and no weights."""
    return (
        config.get("quant_method") == "compressed-tensors"
        and not config.get("config_groups")
        and bool(config.get("kv_cache_scheme"))
    )
