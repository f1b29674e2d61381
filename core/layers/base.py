"""What the loader sees of a layer, and the layer that is one tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine.core.errors import ConfigError
from engine.core.quant.base import TensorSpec

if TYPE_CHECKING:
    from engine.core.autotune.op import AutotunedCall

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types a model computes in."""


def torch_dtype(name: str) -> torch.dtype:
    """The type a model computes in, by name. Raises ConfigError for another."""
    if name not in DTYPES:
        raise ConfigError(f"a model cannot compute in {name!r}; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def plain_tensor(shape: tuple[int, ...], dtype: str, shard_dim: int | None = None) -> TensorSpec:
    """A tensor that may be stored in any of the float types and is cast to `dtype` when it is kept."""
    return TensorSpec(shape=shape, dtypes=(dtype, *(name for name in DTYPES if name != dtype)), shard_dim=shard_dim)


class Layer(ABC):
    """A layer with weights. Not a torch module: calling it costs one Python call."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What to read from the checkpoint, by qualified name."""

    @abstractmethod
    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Keep what was read: this rank's shards of `tensors`, on the device; optional ones may be missing."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights kept; 0 before `fill`."""

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        """Those of its multiplications whose kernel is chosen by measurement, once it is filled."""
        return ()


class TensorLayer(Layer):
    """A layer whose only weight is one tensor, held whole by every rank in the model's type."""

    weight: torch.Tensor

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name = name
        self.shape = shape
        self._dtype = dtype

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The one tensor."""
        return {self.name: plain_tensor(self.shape, self._dtype)}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Keep it, in the model's type."""
        self.weight = loaded[self.name].to(torch_dtype(self._dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes if hasattr(self, "weight") else 0
