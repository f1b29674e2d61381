"""Reads what a quantization_config says about the KV cache, and the names of the scales of keys and values.

kv_cache_scheme is a field of compressed-tensors (quantization/quant_config.py), with the fields of activations; with
quant_method fp8 it is the word "static". Scales are stored next to the attention's projections or, as output scales of
k_proj and v_proj, in them. Checkpoints of quant_method fp8 may have scales without a kv_cache_scheme.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from engine.core.quant import FLOAT8, KVScaleNames
from engine.plugins.quant.quantization_config import QuantArgs

log = logging.getLogger(__name__)

KV_SCALES = ("*.k_scale", "*.v_scale", "*.q_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")
"""Patterns of all tensors of a quantized KV cache, and of scales of queries, which are not quantized here."""
SUPPORTED = QuantArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)


@frozen(kw_only=True)
class KVCacheScheme:
    """How the checkpoint asks for keys and values to be stored."""

    dtype: str | None = None
    """The dtype that the checkpoint asks for. None: none, or an unsupported one."""
    has_scales: bool = False
    """Whether the checkpoint may have usable scales."""
    unsupported: str = ""
    """The unsupported cache that the checkpoint asks for, as text for the warning."""

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> KVCacheScheme:
        """Parse a quantization_config. Raises CheckpointError for one that cannot be read."""
        if config is None:
            return cls()
        stored = config.get("kv_cache_scheme")
        if not stored:
            return cls(has_scales=config.get("quant_method") == "fp8")
        if stored == "static":
            return cls(dtype=FLOAT8, has_scales=True)
        if not isinstance(stored, Mapping):
            return cls(unsupported=repr(stored))
        args = QuantArgs.parse(stored)
        if args == SUPPORTED:
            return cls(dtype=FLOAT8, has_scales=True)
        return cls(unsupported=f"{args}{', dynamic' if args.dynamic else ''}")

    def names(self, attention: str) -> KVScaleNames | None:
        """Names of an attention layer's scales. None: there are none."""
        if not self.has_scales:
            return None
        names = [
            (
                f"{attention}.{letter}_scale",
                f"{attention}.{letter}_proj.output_scale",
                f"{attention}.{letter}_proj.{letter}_scale",
                f"{attention}.attn.{letter}_scale",
                f"{attention}.kv_scale",
            )
            for letter in "kv"
        ]
        return KVScaleNames(keys=names[0], values=names[1])

    def ignored(self) -> Sequence[str]:
        """Patterns of KV cache tensors that may be in the checkpoint and are not read."""
        return KV_SCALES if self.has_scales or self.unsupported else ()

    def warn_unsupported(self) -> None:
        """Log a warning if the checkpoint asks for an unsupported KV cache."""
        if self.unsupported:
            log.warning(
                "the checkpoint asks for a KV cache in %s, which is not supported: its scales are not read; of"
                " quantized caches only %s with one stored scale for a layer's keys and one for its values is",
                self.unsupported,
                FLOAT8,
            )


class ReadsKVCacheScheme:
    """The KV cache's part of a quantization method, answered by a KVCacheScheme. A base to put before QuantMethod."""

    _kv_cache: KVCacheScheme

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        """The dtype that the checkpoint asks for."""
        return KVCacheScheme.parse(checkpoint).dtype

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        """Names of the tensors that may hold the scales of an attention layer."""
        return self._kv_cache.names(attention)

    def ignored(self) -> Sequence[str]:
        """KV cache scales under other names, or of an unsupported kind."""
        return self._kv_cache.ignored()
