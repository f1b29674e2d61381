"""Sampling: from logits to tokens."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.sampling.sampler import Sampler as Sampler

__getattr__, __dir__, __all__ = exports(__name__, sampler=("Sampler",))
