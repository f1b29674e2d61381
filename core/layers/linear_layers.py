"""Makes linear layers from the checkpoint's: their spec, with the names in the checkpoint, and their kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from attrs import evolve, frozen

from engine.core.distributed.rank_group import RankGroup
from engine.core.errors import ConfigError, near_misses
from engine.core.layers.checkpoint_names import CheckpointNames
from engine.core.layers.layer_classes import LayerClasses
from engine.core.layers.linear import Linear
from engine.core.layers.quant_kernels import QuantKernels
from engine.core.quant.base import ACTIVATIONS, Activation, LinearPart, LinearSpec, Parallel, StoredIn


@frozen(kw_only=True, eq=False)
class LinearLayers:
    """Makes the linear layers of a model for one rank."""

    dtype: str
    device: str
    group: RankGroup
    names: CheckpointNames
    quant_kernels: QuantKernels
    classes: LayerClasses

    def make(
        self,
        parts: Sequence[LinearPart],
        in_features: int,
        *,
        bias: bool,
        parallel: Parallel,
        gated: bool = False,
        reduces: bool = True,
        quantized: bool = True,
        activation: Activation = "silu",
        input_activation: Activation = "silu",
        exact_input: bool = False,
        stored: str = "",
    ) -> Linear:
        """Make a linear layer; the other arguments are as in LinearSpec, whose sizes are over all ranks.

        reduces: whether the layer sums the results of row-parallel ranks. quantized: whether the quantization method
        may have a kernel. stored: name of the checkpoint's layer that holds all parts, one after the other; empty: each
        part is a layer of its own name.
        """
        if activation not in ACTIVATIONS:
            raise ConfigError(f"the activation {activation!r} is not known; {near_misses(activation, ACTIVATIONS)}")
        spec = LinearSpec(
            parts=self.names.stored_parts(_stored_in(stored, parts)),
            in_features=in_features,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=parallel,
            gated=gated,
            activation=activation,
            input_activation=input_activation,
            exact_input=exact_input,
            ranks=self.group.ranks,
        )
        spec, kernel = self.quant_kernels.linear(spec) if quantized else (spec, None)
        is_split_by_inputs = parallel == "row" and self.group.ranks > 1
        return Linear(
            spec,
            kernel or self.classes.linear_kernel(spec),
            self.group.all_reduce if is_split_by_inputs and reduces else None,
            self.classes.gated_activation(activation),
            adds_bias=reduces or not is_split_by_inputs or self.group.rank == 0,
            owner=self.quant_kernels.owner,
        )

    def make_head(self, name: str, vocab_size: int, hidden_size: int) -> Linear | None:
        """Make the linear layer of an output layer, column-parallel; None: the output layer is not quantized."""
        spec = LinearSpec(
            parts=self.names.stored_parts([LinearPart(name=name, out_features=vocab_size)]),
            in_features=hidden_size,
            bias=False,
            dtype=self.dtype,
            device=self.device,
            parallel="column",
            ranks=self.group.ranks,
        )
        spec, kernel = self.quant_kernels.lm_head(spec)
        return None if kernel is None else Linear(spec, kernel, owner=self.quant_kernels.owner)


def _stored_in(name: str, parts: Sequence[LinearPart]) -> Sequence[LinearPart]:
    """The parts with their places in the checkpoint's layer `name`, which has all of them; unchanged if it is empty."""
    if not name:
        return parts
    starts = [0, *accumulate(part.out_features for part in parts)]
    return [
        evolve(part, stored_in=StoredIn(name=name, start=start, size=starts[-1]))
        for part, start in zip(parts, starts, strict=False)
    ]
