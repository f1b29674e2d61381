"""Contract of plugins/quant: which tensors a linear layer reads from a checkpoint and how it multiplies by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from engine.core.autotune.op import AutotunedCall
    from engine.core.device import DeviceInfo

API = "1"


@frozen(kw_only=True)
class LinearPart:
    """One linear layer of the checkpoint; several parts of one input are merged into one `LinearSpec`."""

    name: str
    """Qualified name in the checkpoint, as model.layers.0.self_attn.q_proj."""
    out_features: int
    """Over all ranks."""
    replicas: int = 1
    """Of a column-parallel layer: how many ranks side by side hold the same share, as where key and value heads are
    fewer than ranks."""


@frozen(kw_only=True)
class LinearSpec:
    """A linear layer as the model asks for it: y = x W^T + b, with the outputs of its parts side by side."""

    parts: tuple[LinearPart, ...]
    in_features: int
    """Over all ranks."""
    bias: bool
    dtype: str
    """Of activations: float32, bfloat16 or float16."""
    device: str = "cpu"
    """Where it is multiplied, as torch.device takes it."""
    parallel: str = "none"
    """How ranks share it: column (each has some outputs), row (each has some inputs) or none (each has all)."""
    gated: bool = False
    """Whether its two parts are the gate and up projections of a gated MLP, so that `apply_gated` alone is called, but
    for rows of which `gates_at_once` says otherwise."""
    ranks: int = 1
    """How many share it; outputs or inputs divide evenly, as `parallel` says."""

    @property
    def out_features(self) -> int:
        """Outputs of all parts, over all ranks."""
        return sum(part.out_features for part in self.parts)

    def rank_outputs(self, part: LinearPart) -> int:
        """Outputs of a part that one rank holds."""
        return part.out_features * part.replicas // self.ranks if self.parallel == "column" else part.out_features

    @property
    def rank_inputs(self) -> int:
        """Inputs that one rank holds."""
        return self.in_features // self.ranks if self.parallel == "row" else self.in_features


@frozen(kw_only=True)
class TensorSpec:
    """A tensor expected in the checkpoint."""

    shape: tuple[int, ...]
    """Over all ranks; -1: any size. (1,): a scalar too, which is read as this."""
    dtypes: tuple[str, ...]
    """Types accepted, as safetensors files name them in torch ("bfloat16", "float8_e4m3fn", "int32")."""
    shard_dim: int | None = None
    """The dimension that tensor-parallel ranks share out evenly; None: every rank reads all of it."""
    optional: bool = False
    replicas: int = 1
    """How many ranks side by side hold the same share. The layer sets it, from its parts."""
    share: int | None = None
    """How much of that dimension a rank holds, so that what is left for the last ones may be less; None: all the same.
    """


@frozen(kw_only=True)
class KVScaleNames:
    """Tensors of the checkpoint, one number each, that may hold an attention layer's KV scales (kv_scales.KVScales)."""

    keys: tuple[str, ...]
    """Of these the first that is there is the scale of the keys."""
    values: tuple[str, ...]


class QuantizedActivation:
    """A quantized input of one linear layer, made by its `FusedInputQuantization`: quantized values and scales, say."""

    __slots__ = ()


class FusedInputQuantization(ABC):
    """How a kernel has its input made, in its own form, by the very kernel that computes it.

    Whoever computes an input of a linear layer asks for it there (`RMSNorm.into`, `Linear.gated_into`), with as many
    rows as it `takes`. Results are to be those of the steps one after the other. On a GPU all of it is captured in
    CUDA graphs: it may choose by the shape of its arguments, but must not wait for the device.
    """

    @abstractmethod
    def takes(self, rows: int) -> bool:
        """Whether so many rows come this way; others go to `LinearKernel.apply`, as they are."""

    @abstractmethod
    def normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[QuantizedActivation, torch.Tensor]:
        """The norm (root mean square) of x + residual, and the sum, which may overwrite `residual`.

        x, residual: [rows, in_features]; norm_weight: [in_features]; all of one type. weights: as for `apply`.
        """

    @abstractmethod
    def activated(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> QuantizedActivation:
        """silu(gate) * up. x: [rows, 2 * in_features], gate and up side by side."""

    @abstractmethod
    def apply(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `LinearKernel.apply`, of what one of the others made: [rows, out_features]."""


class LinearKernel(ABC):
    """One linear layer under one quantization method."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What to read, by qualified name, over all parts."""

    @abstractmethod
    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Merge, quantize or repack what was read (this rank's shards, by the names of `tensors`); pure.

        The result is what `apply` is given; the loader drops `loaded` at once.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features], in x's dtype."""

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(gate) * up of the two halves of `apply`'s outputs: [..., out_features / 2].

        Override it where both go in one pass; a kernel that does not is called by `apply`, and the layer activates.
        """
        from engine.core.layers.activation import silu_and_mul

        return silu_and_mul(self.apply(x, weights, bias))

    def gates_at_once(self, rows: int) -> bool:
        """Whether `apply_gated` activates so many rows where it multiplies them.

        If not, `apply` may be called in its place, and what comes next activates.
        """
        return type(self).apply_gated is not LinearKernel.apply_gated

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """How its input is made for it; None: it takes tensors alone."""
        return None

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """Those of its multiplications whose kernel is to be chosen by measurement, on a GPU.

        weights, bias: as for `apply`.
        """
        return ()


class QuantMethod(ABC):
    """A way to store and multiply weights."""

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None

    @classmethod
    @abstractmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Why not, and what would work; None if it can.

        checkpoint: quantization_config of the model's config.json; None for an unquantized one.
        """

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: Any) -> QuantMethod:
        """An instance for this checkpoint; for None, one that quantizes while loading."""

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        """The type of keys and values that the checkpoint asks for; None: it does not.

        checkpoint: as for `refuses`, which has not refused it.
        """
        return None

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        """Where the scales of a quantized KV cache may be; None: the checkpoint has none.

        attention: qualified name of the layer in the checkpoint, as model.layers.0.self_attn.
        """
        return None

    def ignored(self) -> Sequence[str]:
        """Names (as file names match: `*.name`) of tensors of this method that may be in the checkpoint, unread."""
        return ()

    @abstractmethod
    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """The kernel of one linear layer; None: leave this layer in the model's own type."""
