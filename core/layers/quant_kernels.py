"""The kernels that a quantization method makes for the layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

from engine.core.errors import ConfigError
from engine.core.layers.experts import Experts
from engine.core.layers.former_prefixes import best_answer
from engine.core.layers.linear import Linear
from engine.core.plugin_host.faults import blame, expect
from engine.core.quant.base import KVScaleNames, LinearKernel, LinearSpec, QuantMethod
from engine.core.quant.experts import ExpertsKernel, ExpertsSpec

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.checkpoint_names import CheckpointNames

log = logging.getLogger(__name__)


class QuantKernels:
    """Asks a quantization method for kernels, by each name that a layer has, and checks the answers."""

    def __init__(self, quant: QuantMethod[Any] | None, owner: str, names: CheckpointNames) -> None:
        """quant: None: no layer is quantized. owner: how errors name the plugin of the method."""
        self.owner = owner
        self._quant = quant
        self._names = names
        self._has_warned = False

    def ignored(self) -> Sequence[str]:
        """Patterns of the checkpoint's tensors that the method does not read."""
        if self._quant is None:
            return ()
        with blame(self.owner, "ignored()"):
            ignored = self._quant.ignored()
            right = not isinstance(ignored, str) and all(isinstance(one, str) for one in ignored)
        expect(right, self.owner, "ignored()", ignored, "a sequence of patterns")
        return ignored

    def linear(self, spec: LinearSpec) -> tuple[LinearSpec, LinearKernel | None]:
        """The kernel of a linear layer, and the spec with the names that the kernel has. None: it is not quantized.

        spec: with the checkpoint's names.
        """
        return self._linear_kernel("linear", spec)

    def lm_head(self, spec: LinearSpec) -> tuple[LinearSpec, LinearKernel | None]:
        """As `linear`, for an output layer."""
        return self._linear_kernel("lm_head", spec)

    def _linear_kernel(
        self, method: Literal["linear", "lm_head"], spec: LinearSpec
    ) -> tuple[LinearSpec, LinearKernel | None]:
        if self._quant is None:
            return spec, None
        present = evolve(spec, parts=self._names.present_parts(spec.parts))
        specs = [spec] if present == spec else [spec, present]
        return best_answer(
            specs,
            lambda one: self._ask_linear(method, one),
            lambda one, kernel: self._names.has_quantized(Linear(one, kernel, owner=self.owner).tensors()),
        )

    def _ask_linear(self, method: Literal["linear", "lm_head"], spec: LinearSpec) -> LinearKernel | None:
        call = f"{method}() of {spec.parts[0].name}"
        assert self._quant is not None
        with blame(self.owner, call):
            kernel = self._quant.linear(spec) if method == "linear" else self._quant.lm_head(spec)
        right = kernel is None or isinstance(kernel, LinearKernel)
        expect(right, self.owner, call, kernel, "a LinearKernel or None")
        return kernel

    def experts(self, spec: ExpertsSpec, group: RankGroup) -> tuple[ExpertsSpec, ExpertsKernel | None]:
        """The kernel of a layer's experts, and the spec with the names that the kernel has. None: they are not
        quantized.

        spec: with the checkpoint's names.
        """
        present = evolve(spec, name=self._names.present(spec.name))
        specs = [spec] if present == spec else [spec, present]
        spec, kernel = best_answer(
            specs,
            self._ask_experts,
            lambda one, kernel: self._names.has_quantized(Experts(one, kernel, group, owner=self.owner).tensors()),
        )
        if kernel is not None and spec.activation not in kernel.activations:
            raise ConfigError(
                f"{self.owner} computes experts with {', '.join(kernel.activations)}, and this model's"
                f" experts have {spec.activation}; choose another method, or an unquantized checkpoint"
            )
        if kernel is None and self._quant is not None and type(self._quant).experts is QuantMethod.experts:
            self._warn_of_plain_experts(self._quant, spec)
        return spec, kernel

    def _ask_experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        if self._quant is None:
            return None
        with blame(self.owner, f"experts() of {spec.name}"):
            kernel = self._quant.experts(spec)
        right = kernel is None or isinstance(kernel, ExpertsKernel)
        expect(right, self.owner, f"experts() of {spec.name}", kernel, "an ExpertsKernel or None")
        return kernel

    def _warn_of_plain_experts(self, quant: QuantMethod[Any], spec: ExpertsSpec) -> None:
        """Log, once, that a method without `experts` quantizes linear layers alone."""
        if not self._has_warned:
            with blame(self.owner, f"linear() of {spec.name}"):
                self._has_warned = quant.linear(spec.linears(0)[0]) is not None
            if self._has_warned:
                log.warning("%s quantizes linear layers but not experts, which stay in %s", self.owner, spec.dtype)

    def kv_scale_names(self, module: str) -> KVScaleNames | None:
        """The names of the KV scales that the checkpoint may have for an attention module; None: it has none."""
        if self._quant is None:
            return None
        with blame(self.owner, "kv_scales()"):
            names = self._quant.kv_scales(self._names.stored(module))
        right = names is None or isinstance(names, KVScaleNames)
        expect(right, self.owner, "kv_scales()", names, "a KVScaleNames or None")
        return names
