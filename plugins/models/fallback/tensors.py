"""Layers by which the loader fills modules that run as the library wrote them, and a layer to be filled last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from engine.core.layers import Layer, plain_tensor
from engine.core.quant import TensorSpec
from engine.plugins.models.fallback.names import Conversion


class ModuleTensor(Layer):
    """A parameter or buffer of one module."""

    def __init__(self, module: nn.Module, attribute: str, name: str, *, dtype: str, shard_dim: int | None = None):
        """name: in the checkpoint."""
        self._module = module
        self._attribute = attribute
        self._name = name
        self._dtype: torch.dtype = getattr(torch, dtype)
        shape = tuple(getattr(module, attribute).shape)
        is_float = self._dtype.is_floating_point
        self._spec = (
            plain_tensor(shape, dtype, shard_dim)
            if is_float
            else TensorSpec(shape=shape, dtypes=(dtype,), shard_dim=shard_dim)
        )

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {self._name: self._spec}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        put(self._module, self._attribute, loaded[self._name].to(self._dtype))

    @property
    def nbytes(self) -> int:
        tensor: torch.Tensor = getattr(self._module, self._attribute)
        return 0 if tensor.is_meta else tensor.nbytes


class ConvertedTensors(Layer):
    """Tensors of the model that the library converts from the checkpoint's, several to one or one to several."""

    def __init__(self, conversion: Conversion, places: Mapping[str, tuple[nn.Module, str, str]]) -> None:
        """places: name in the model -> its module, attribute and dtype."""
        self._conversion = conversion
        self._places = {name: places[name] for name in conversion.targets}

    def tensors(self) -> Mapping[str, TensorSpec]:
        dtype = next(iter(self._places.values()))[2]
        return {name: plain_tensor(shape, dtype) for name, shape in self._conversion.sources.items()}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._conversion.convert(loaded).items():
            module, attribute, dtype = self._places[name]
            put(module, attribute, tensor.to(getattr(torch, dtype)).contiguous())

    @property
    def nbytes(self) -> int:
        held = [getattr(module, attribute) for module, attribute, _ in self._places.values()]
        return sum(tensor.nbytes for tensor in held if not tensor.is_meta)


class AfterLoading(Layer):
    """Calls a function once all weights are loaded. Record it last."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self._finish()

    @property
    def nbytes(self) -> int:
        return 0


def put(module: nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer of a module."""
    if attribute in module._parameters:
        module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[attribute] = tensor


def make_buffers(model: Any, device: str, loaded: frozenset[str]) -> list[str]:
    """Compute the buffers that no checkpoint has, as rotary frequencies. Returns the names of those left unmade.

    loaded: names of buffers that the loader fills. The library computes the others in its initialization of weights,
    which runs twice, over memory with different values, to see which it computes.
    """
    made: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            qualified = f"{name}.{attribute}".removeprefix(".")
            if buffer is not None and buffer.is_meta and qualified not in loaded:
                made[qualified] = module, attribute
    owners = {id(module): module for module, _ in made.values()}
    results: list[dict[str, torch.Tensor]] = []
    for value in (0, 1):
        for module, attribute in made.values():
            module._buffers[attribute] = torch.full_like(getattr(module, attribute), value, device=device)
        for module in owners.values():
            model._init_weights(module)
        results.append({name: getattr(module, attribute) for name, (module, attribute) in made.items()})
    first, second = results
    return [name for name in made if not torch.equal(first[name], second[name])]
