"""The contract between layers and the loader, and the layer with one tensor."""

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
"""dtypes that a model can compute in."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ConfigError if models cannot compute in it."""
    if name not in DTYPES:
        raise ConfigError(f"a model cannot compute in {name!r}; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def plain_tensor(shape: tuple[int, ...], dtype: str, shard_dim: int | None = None) -> TensorSpec:
    """Spec of a tensor stored in any of DTYPES, which the layer casts to `dtype`."""
    return TensorSpec(shape=shape, dtypes=(dtype, *(name for name in DTYPES if name != dtype)), shard_dim=shard_dim)


class Layer(ABC):
    """A layer with weights. Not a torch module, so that a call costs one Python call."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors to read from the checkpoint, by qualified name."""

    @property
    def tensor_owners(self) -> Mapping[str, str]:
        """How errors name the plugins that ask for tensors, by the tensor's name; the model asks for the others."""
        return {}

    @abstractmethod
    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Keep the loaded tensors: this rank's shards of `tensors`, on the device. Optional ones may be missing."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights on this rank; 0 before `fill`."""

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the weights for which oneDNN compiles kernels on a CPU: packed ones and those of 16 bits."""
        return frozenset()

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        """The GEMMs of this layer whose kernel is chosen by measurement. Called after `fill`."""
        return ()


class TensorLayer(Layer):
    """A layer with one tensor, which every rank holds whole in the model's dtype."""

    weight: torch.Tensor

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name = name
        self.shape = shape
        self._dtype = dtype

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {self.name: plain_tensor(self.shape, self._dtype)}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self.weight = loaded[self.name].to(torch_dtype(self._dtype))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes if hasattr(self, "weight") else 0
