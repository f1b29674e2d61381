"""Which plugins ask for a checkpoint's tensors, for the text of errors about them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import field, frozen

MODEL = "the model"
"""How errors name what asks for a tensor that no plugin asks for."""
UNQUANTIZED = ("weight", "bias")
"""Last parts of the names of an unquantized layer's tensors."""


@frozen(kw_only=True)
class TensorOwners:
    """The plugins that ask for tensors of layers, as errors name them."""

    by_tensor: Mapping[str, str] = field(factory=dict)
    """Name of a tensor -> the plugin. MODEL asks for all others."""
    quant: str = ""
    """The plugin of the quantization method. Empty: there is none."""
    has_kernels: bool = False
    """Whether the quantization method has made the kernel of a layer."""

    def of(self, name: str) -> str:
        """How errors name what asks for a tensor."""
        return self.by_tensor.get(name, MODEL)

    @property
    def names(self) -> Sequence[str]:
        """The plugins that ask for tensors, or could."""
        return sorted({*self.by_tensor.values(), *([self.quant] if self.has_kernels else [])})

    def quant_hint(self, stored: Collection[str], wanted: Collection[str], config: Mapping[str, Any] | None) -> str:
        """Why the quantization method does not fit the checkpoint, and what to do; empty if it may fit.

        stored: names of all tensors in the checkpoint. wanted: of those that layers ask for. config: the checkpoint's
        quantization_config; None: it has none.
        """
        if not self.quant:
            return ""
        looks_quantized = _look_quantized(stored, wanted)
        choose = "choose another method with --quant (of a speculator: --speculator-quant)"
        if config is None and looks_quantized:
            return (
                "the weights look quantized, but config.json has no quantization_config that says how, and"
                f" {self.quant} does not read them: fetch config.json again, or {choose}"
            )
        if self.by_tensor or not (looks_quantized or self.has_kernels):
            return ""
        if config is None:
            return f"{self.quant} reads no tensors of the layers that it quantizes: {choose}"
        return (
            f"config.json says that the weights are quantized ({config.get('quant_method', 'no quant_method')}), and"
            f" {self.quant} reads no quantized tensors: {choose}; engine plugins check shows which can read them"
        )


Owners = Callable[[], TensorOwners]
"""Returns the owners of the tensors; called for the text of an error only."""


def _look_quantized(stored: Collection[str], wanted: Collection[str]) -> bool:
    """Whether the checkpoint has, next to a weight that layers ask for, tensors that only quantized layers have."""
    modules = {module for module, _, end in (name.rpartition(".") for name in wanted) if end == "weight"}
    others = (name.rpartition(".") for name in stored if name not in wanted)
    return any(module in modules and end not in UNQUANTIZED for module, _, end in others)
