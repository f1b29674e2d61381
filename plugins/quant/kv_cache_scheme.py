"""What a quantization_config says of the KV cache, and what the scales of keys and values are called.

kv_cache_scheme is of compressed-tensors (quantization/quant_config.py), which describes it as it does activations, or,
with quant_method fp8, the word "static". Scales lie beside the attention's projections or, as outputs of k_proj and
v_proj, in them. Checkpoints of quant_method fp8 may have them without saying so.
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
"""All tensors of a quantized KV cache, as file names match, and those of queries, which are not quantized here."""
SUPPORTED = QuantArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)


@frozen(kw_only=True)
class KVCacheScheme:
    """How the checkpoint would have keys and values stored."""

    dtype: str | None = None
    """What it asks for; None: nothing, or something that is not supported."""
    has_scales: bool = False
    """Whether it may have scales that can be used."""
    unsupported: str = ""
    """What it asks for in vain, in words."""

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> KVCacheScheme:
        """Of a quantization_config. Raises CheckpointError for one that cannot be read."""
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
        """Where an attention layer's scales may be; None: nowhere."""
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
        """Names of tensors that may be in the checkpoint unread."""
        return KV_SCALES if self.has_scales or self.unsupported else ()

    def say(self) -> None:
        """Warn of what is asked for in vain."""
        if self.unsupported:
            log.warning(
                "the checkpoint asks for a KV cache in %s, which is not supported: its scales are not read; of"
                " quantized caches only %s with one stored scale for a layer's keys and one for its values is",
                self.unsupported,
                FLOAT8,
            )
