"""The common base of layers around a kernel of a quantization method."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

from engine.core.layers.base import Layer
from engine.core.plugin_host.faults import PluginCall, blame, expect
from engine.core.quant.base import LinearKernel, TensorSpec
from engine.core.quant.experts import ExpertsKernel

K = TypeVar("K", bound=LinearKernel | ExpertsKernel)


class KernelLayer(Layer, Generic[K]):
    """A layer whose weights a kernel prepares. Mistakes of the kernel name its plugin and the layer."""

    def __init__(self, kernel: K, name: str, owner: str) -> None:
        """name: of the layer, and owner: of the plugin that made the kernel, in errors."""
        self.kernel = kernel
        self.weights: Mapping[str, torch.Tensor] = {}
        """What the kernel prepared; {} before `fill`."""
        self.plugin_call = PluginCall(owner, name)
        """The kernel's plugin and the layer, as errors of a step name them."""

    @property
    def has_core_kernel(self) -> bool:
        """Whether the kernel is core's own, for weights that are not quantized."""
        return type(self.kernel).__module__.startswith("engine.core.")

    @property
    def tensor_owners(self) -> Mapping[str, str]:
        return {} if self.has_core_kernel else dict.fromkeys(self._kernel_tensors(), self.plugin_call.owner)

    def _kernel_tensors(self) -> Mapping[str, TensorSpec]:
        """The tensors that the kernel reads."""
        with self._blame("tensors()"):
            given = self.kernel.tensors()
            right = isinstance(given, Mapping) and all(isinstance(one, TensorSpec) for one in given.values())
        self._expect(right, "tensors()", given, "a mapping of names to TensorSpecs")
        return given

    def _prepare(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Have the kernel prepare the weights. loaded: the tensors that it reads."""
        with self._blame("prepare()"):
            weights = self.kernel.prepare(loaded)
            right = isinstance(weights, Mapping) and all(isinstance(one, torch.Tensor) for one in weights.values())
        self._expect(right, "prepare()", weights, "a mapping of names to tensors")
        self.weights = weights

    def _blame(self, call: str) -> AbstractContextManager[None]:
        return blame(self.plugin_call.owner, f"{call} of {self.plugin_call.call}")

    def _expect(self, right: object, call: str, found: object, wanted: str) -> None:
        expect(right, self.plugin_call.owner, f"{call} of {self.plugin_call.call}", found, wanted)
