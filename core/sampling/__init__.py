"""Sampling: from logits to tokens, on one of three paths (greedy, draw, full)."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.sampling.base import SamplingPath as SamplingPath
    from engine.core.sampling.sampler import Sampler as Sampler

__getattr__, __dir__, __all__ = exports(__name__, base=("SamplingPath",), sampler=("Sampler",))
