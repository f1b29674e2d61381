"""Contract of mixture-of-experts layers: a quantization method's `ExpertsKernel` multiplies by the weights of experts.

An expert is a gated MLP: down(activation(gate(x)) * up(x)). A router chooses `top_k` experts per token and weights
their results (`Routing`); the layer's output is the weighted sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, frozen

from engine.core.quant.base import Activation, LinearPart, LinearSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from engine.core.autotune.op import AutotunedCall

ExpertsParallel = Literal["tensor", "expert"]
"""How ranks share the experts. tensor: each rank has a shard of every expert. expert: each rank has some of the experts
whole. Either way a rank computes a partial sum of the outputs."""


@frozen(kw_only=True)
class ExpertsSpec:
    """The experts of one layer. All have the same size."""

    name: str
    """Qualified name in the checkpoint, as model.layers.0.mlp.experts."""
    num_experts: int
    """Over all ranks."""
    top_k: int
    """Experts per token."""
    hidden_size: int
    intermediate_size: int
    """Intermediate size of each expert, over all ranks."""
    dtype: str
    """Dtype of activations: float32, bfloat16 or float16."""
    device: str = "cpu"
    activation: Activation = "silu"
    bias: bool = False
    """Whether the projections have biases. The layer reads them and passes them to `ExpertsKernel.apply`."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's projections to gate, up and down."""
    stacked: bool = False
    """Whether the checkpoint stores all experts in one tensor: NAME.gate_up_proj, [experts, 2 * intermediate, hidden],
    and NAME.down_proj, [experts, hidden, intermediate]. False: a module per expert and projection, as
    NAME.3.gate_proj."""
    transposed: bool = False
    """Of stacked weights: whether inputs come before outputs, as [experts, hidden, 2 * intermediate]."""
    interleaved: bool = False
    """Of stacked weights: whether gate and up outputs alternate. False: all gate outputs come first."""
    parallel: ExpertsParallel = "tensor"
    rank: int = 0
    ranks: int = 1

    @property
    def rank_experts(self) -> range:
        """The experts of which this rank has weights."""
        if self.parallel == "tensor":
            return range(self.num_experts)
        count = self.num_experts // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)

    @property
    def rank_intermediate(self) -> int:
        """The intermediate size of each expert on this rank."""
        return self.intermediate_size // self.ranks if self.parallel == "tensor" else self.intermediate_size

    def linears(self, expert: int) -> tuple[LinearSpec, LinearSpec]:
        """The merged gate and up projections of one expert, and its down projection, as linear layers."""
        gate, up, down = (f"{self.name}.{expert}.{projection}" for projection in self.projections)
        split = self.parallel == "tensor"
        return (
            LinearSpec(
                parts=tuple(LinearPart(name=name, out_features=self.intermediate_size) for name in (gate, up)),
                in_features=self.hidden_size,
                bias=False,
                dtype=self.dtype,
                device=self.device,
                parallel="column" if split else "none",
                gated=True,
                activation=self.activation,
                ranks=self.ranks if split else 1,
            ),
            LinearSpec(
                parts=(LinearPart(name=down, out_features=self.hidden_size),),
                in_features=self.intermediate_size,
                input_activation=self.activation,
                bias=False,
                dtype=self.dtype,
                device=self.device,
                parallel="row" if split else "none",
                ranks=self.ranks if split else 1,
            ),
        )


@define(eq=False)
class Routing:
    """The experts that a router has chosen for each token."""

    experts: torch.Tensor
    """[tokens, top_k] int32: numbers of this rank's experts, counted from 0. -1: an expert of another rank. The experts
    of a token differ."""
    weights: torch.Tensor
    """[tokens, top_k] float32: the factors of the experts' results."""


@frozen(eq=False)
class ExpertsBias:
    """Biases of this rank's experts, in the dtype of activations."""

    gate_up: torch.Tensor
    """[experts, 2 * intermediate], all of the gate first."""
    down: torch.Tensor
    """[experts, hidden]; zeros where another rank adds them."""


class ExpertsKernel(ABC):
    """The experts of one layer under one quantization method: reads their tensors and multiplies by them."""

    activations: ClassVar[tuple[Activation, ...]] = ("silu",)
    """The `ExpertsSpec.activation`s that `apply` computes; a model with another is refused."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors to read, by qualified name. `engine.core.layers.ExpertTensors` lists those of either layout."""

    @abstractmethod
    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Stack, quantize or repack the loaded tensors. Called once, at load; must not write to `loaded`.

        loaded: this rank's shards, by the names of `tensors`; dropped after the call. Returns the `weights` of `apply`.
        """

    @abstractmethod
    def apply(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, as far as this rank has them: [tokens, hidden_size], in x's dtype.

        x: [tokens, hidden_size]. weights: what `prepare` returned. On a GPU the call is captured in CUDA graphs: it may
        choose by the shape of x, but must not synchronize with the device, nor depend on the routing's values in what
        it launches.
        """

    def autotuned_calls(self, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None) -> Sequence[AutotunedCall]:
        """The products whose implementation is to be chosen by measurement on the GPU; arguments as in `apply`."""
        return ()
