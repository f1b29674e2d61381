"""Keys and values in float8 (e4m3): what a code stands for.

A code is value / scale, rounded to the nearest and saturated at +-448; the value read is code * scale. Keys and values
of a layer have one scale each. In a cache of any other type all scales are 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

FLOAT8 = "float8_e4m3fn"
LARGEST = 448.0
"""Of the codes that are numbers."""


@frozen(kw_only=True)
class KVScales:
    """The scales of one layer's keys and values, positive and finite."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def encode(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Codes of numbers of any shape, as float8_e4m3fn. NaN stays NaN; a cast alone makes NaN of what is too large."""
    import torch

    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
