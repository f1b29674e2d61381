"""Contract of plugins/quant: a quantization method and the linear kernels that it makes.

A `QuantMethod` is asked for a `LinearKernel` per linear layer (`LinearSpec`). The kernel names the tensors to read
(`TensorSpec`), prepares its weights once, at load, and multiplies by them in each forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

from attrs import Attribute, field, frozen

if TYPE_CHECKING:
    import torch

    from engine.core.autotune.op import AutotunedCall
    from engine.core.device import DeviceInfo
    from engine.core.quant.experts import ExpertsKernel, ExpertsSpec

API = "2"
"""Version of this contract. "2": layers say their activation, which was always silu in "1"; `QuantMethod.lm_head` and
`experts`."""

Parallel = Literal["none", "column", "row"]
"""How tensor-parallel ranks share a linear layer. column: each rank has some of the outputs. row: each rank has some of
the inputs, and computes a partial sum of all outputs. none: each rank has the whole layer."""
Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
"""Activation of a gated layer, act(gate) * up. gelu: by the error function; gelu_tanh: its approximation by tanh;
swiglu_oai: gpt-oss's clamped SwiGLU (`engine.core.layers.swiglu_oai_and_mul`)."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
OptionsT = TypeVar("OptionsT")
"""A method's options_class, or None for a method without options."""


@frozen(kw_only=True)
class StoredIn:
    """Where the checkpoint has a layer, or a tensor, as a part of a larger one."""

    name: str
    """Name of the larger layer or tensor."""
    start: int
    """Output of the larger layer with which the part begins. For a tensor: index in the dimension of the outputs."""
    size: int
    """Number of outputs of the larger layer. For a tensor: size of the dimension of the outputs."""


@frozen(kw_only=True)
class LinearPart:
    """One linear layer of the checkpoint. Parts with the same input are merged into one `LinearSpec`."""

    name: str
    """Qualified name in the checkpoint, or as the model asks for the layer: model.layers.0.self_attn.q_proj."""
    out_features: int
    """Over all ranks."""
    replicas: int = 1
    """Of a column-parallel layer: number of adjacent ranks that hold the same shard. More than 1 where there are fewer
    KV heads than ranks."""
    stored_in: StoredIn | None = None
    """The larger layer of the checkpoint that this one is a part of, as queries are of a qkv_proj. The layer reads from
    there what a kernel asks for by `name`. None: the checkpoint has the layer under `name`."""

    @property
    def stored_name(self) -> str:
        """Name of the layer in the checkpoint, which a quantization_config knows."""
        return self.name if self.stored_in is None else self.stored_in.name


@frozen(kw_only=True)
class LinearSpec:
    """A linear layer that the model asks for: y = x W^T + b. The outputs of its parts are concatenated."""

    parts: tuple[LinearPart, ...]
    in_features: int
    """Over all ranks."""
    bias: bool
    dtype: str
    """Dtype of activations: float32, bfloat16 or float16."""
    device: str = "cpu"
    """Where the layer computes, as torch.device takes it."""
    parallel: Parallel = "none"
    """How ranks share the layer."""
    gated: bool = False
    """Whether the two parts are the gate and up projections of a gated MLP. The layer then calls `apply_gated`, or
    `apply` and an activation where `LinearKernel.fuses_gating` is False."""
    activation: Activation = "silu"
    """Of a gated layer: the activation of the gate."""
    input_activation: Activation = "silu"
    """The activation that makes the input of the layer, if that is a gated layer's result: what
    `FusedInputQuantization.activate_and_quantize` computes."""
    exact_input: bool = False
    """Whether the input must not be quantized: the layer is applied to the identity at load, to read its weights."""
    ranks: int = 1
    """Number of ranks. They divide the outputs (column) or inputs (row) evenly."""

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


def _check_names(spec: TensorSpec, attribute: Attribute[tuple[str, ...]], names: tuple[str, ...]) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{attribute.name} has the names of torch's types, as ('bfloat16', 'float32'), not {names!r}")


def _check_shard_dim(spec: TensorSpec, attribute: Attribute[int | None], dim: int | None) -> None:
    if dim is not None and not 0 <= dim < len(spec.shape):
        raise ValueError(f"{attribute.name} = {dim} is not a dimension, counted from 0, of the shape {spec.shape}")


@frozen(kw_only=True)
class TensorSpec:
    """A tensor expected in the checkpoint."""

    shape: tuple[int, ...]
    """Over all ranks. -1: any size. (1,): one number, which the checkpoint may store with any number of dimensions."""
    dtypes: tuple[str, ...] = field(validator=_check_names)
    """Accepted types, by their names in torch ("bfloat16", "float8_e4m3fn", "int32")."""
    shard_dim: int | None = field(default=None, validator=_check_shard_dim)
    """The dimension that tensor-parallel ranks split, evenly without `shard_size`. None: every rank reads it all."""
    optional: bool = False
    """Whether the checkpoint may lack the tensor."""
    replicas: int = 1
    """Number of adjacent ranks that hold the same shard. The layer sets it from its parts; a kernel leaves it at 1."""
    shard_size: int | None = None
    """Size of a rank's shard along shard_dim; the last ranks' shards may be smaller. None: an even division."""
    shard_parts: int = 1
    """Number of equal parts of shard_dim, each of which the ranks split: 2 for a gate and an up projection in one."""
    only_rank: int | None = None
    """The one rank that reads the tensor, whole. None: all ranks."""
    stored_in: StoredIn | None = None
    """The larger tensor of the checkpoint that this one is a slice of, along shard_dim; all of it without a shard_dim.
    The layer sets it from its parts; a kernel leaves it at None."""


def stored_tensor(name: str, spec: TensorSpec) -> str:
    """The name of the checkpoint's tensor that holds the tensor of this name."""
    return name if spec.stored_in is None else spec.stored_in.name


@frozen(kw_only=True)
class KVScaleNames:
    """Names of the checkpoint's tensors that may hold an attention layer's `KVScales`, one number each."""

    keys: tuple[str, ...]
    """Candidates for the scale of the keys. The first that the checkpoint has is read."""
    values: tuple[str, ...]
    """The same for the scale of the values."""


class QuantizedActivation:
    """A quantized input of one linear layer, made by its `FusedInputQuantization`.

    A subclass holds what its kernel multiplies, such as quantized values and scales. Core passes it on unread.
    """

    __slots__ = ()


class FusedInputQuantization(ABC):
    """Quantizes a linear kernel's input inside the preceding norm or activation kernel.

    The preceding norm (`RMSNorm.quantized_for`) or gated layer (`Linear.gated_quantized_for`) calls it in place of its
    own kernel where `supports_rows` is True. Results must equal those of the separate steps: norm or activation, then
    `LinearKernel.apply`. On a GPU the calls are captured in CUDA graphs: they may choose by the shapes of their
    arguments, but must not synchronize with the device.
    """

    activations: ClassVar[tuple[Activation, ...]] = ("silu",)
    """The `LinearSpec.input_activation`s that `activate_and_quantize` computes; for others it is not called."""
    reads_float32_norm_weight: ClassVar[bool] = False
    """Whether `norm_and_quantize` takes a norm_weight in float32 next to x in 16 bits, as norms with an offset have it;
    if not, it is not called for those norms."""

    @property
    def has_row_tensors(self) -> bool:
        """Whether an activation that this object quantized is a few tensors with one entry per row, each of which
        depends on its row alone. Then several ranks can each quantize some of the rows, also fewer rows than
        `supports_rows` accepts. All tensors together take no more memory than the rows in 16 bits."""
        return False

    def row_tensors(self, made: QuantizedActivation) -> Sequence[torch.Tensor]:
        """The tensors of an activation: each [rows, ...]. Called only where `has_row_tensors` is True."""
        raise NotImplementedError(f"{type(self).__name__} has no row_tensors()")

    def from_row_tensors(self, tensors: Sequence[torch.Tensor]) -> QuantizedActivation:
        """The activation of tensors like those of `row_tensors`, contiguous, of other rows."""
        raise NotImplementedError(f"{type(self).__name__} has no from_row_tensors()")

    @abstractmethod
    def supports_rows(self, rows: int) -> bool:
        """Whether inputs of this many rows are quantized here. Others go to `LinearKernel.apply` as tensors."""

    @abstractmethod
    def norm_and_quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[QuantizedActivation, torch.Tensor]:
        """RMSNorm of x + residual, quantized; and the sum x + residual, which may overwrite `residual`.

        x, residual: [rows, in_features]; norm_weight: [in_features]; all of one dtype, but for
        `reads_float32_norm_weight`. residual: None counts as zeros.
        weights: as in `LinearKernel.apply`.
        """

    def sum_norm_and_quantize(
        self,
        addends: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[QuantizedActivation, torch.Tensor]:
        """As `norm_and_quantize` of the sum of `addends`, computed in float32 and rounded once to their dtype.

        addends: 2 to 4 tensors [rows, in_features], one of each rank; not overwritten. They are added in their order,
        so that all ranks have the same sum to the last bit. Override it in a kernel that adds them, too.
        """
        from engine.core.distributed.partial_sum import sum_addends

        return self.norm_and_quantize(sum_addends(addends), residual, norm_weight, eps, weights)

    @abstractmethod
    def activate_and_quantize(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> QuantizedActivation:
        """act(gate) * up, quantized; act is the `input_activation` of the layer's spec.

        x: [rows, 2 * in_features], gate before up in each row. weights: as in `LinearKernel.apply`.
        """

    @abstractmethod
    def apply(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`LinearKernel.apply` of an activation that this object quantized: [rows, out_features]."""

    def fuses_quantized_gating(self, made: QuantizedActivation) -> bool:
        """Whether `apply_quantized_gated` is the faster way for this input of a gated layer.

        If False, as by default, the layer calls `apply` and activates, or lets the next layer's
        `FusedInputQuantization` activate. Not called if the kernel does not override `LinearKernel.apply_gated` for the
        layer's activation.
        """
        return False

    def apply_quantized_gated(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`LinearKernel.apply_gated` of an activation that this object quantized: [rows, out_features / 2].

        Called only where `fuses_quantized_gating` is True.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply_quantized_gated()")


class LinearKernel(ABC):
    """One linear layer under one quantization method: reads its tensors, prepares its weights, multiplies."""

    activations: ClassVar[tuple[Activation, ...]] = ("silu",)
    """The `LinearSpec.activation`s that `apply_gated` computes; for others the layer calls `apply` and activates."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors to read, by qualified name, of all parts."""

    @abstractmethod
    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Merge, quantize or repack the loaded tensors. Called once, at load; must not write to `loaded`.

        loaded: this rank's shards, by the names of `tensors`; dropped after the call. Returns the `weights` of `apply`.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias. x: [..., in_features] -> [..., out_features], in x's dtype.

        weights: what `prepare` returned. bias: [out_features] or None. Sizes are this rank's.
        """

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """act(gate) * up, of the first and second half of `apply`'s outputs: [..., out_features / 2].

        act: the `activation` of the layer's spec; of this default, silu. Override it in a kernel that computes both in
        one pass. If it is not overridden, layers call `apply` and activate the result.
        """
        from engine.core.layers.activation import silu_and_mul

        return silu_and_mul(self.apply(x, weights, bias))

    def fuses_gating(self, rows: int) -> bool:
        """Whether `apply_gated` is the faster way for this many rows.

        If False, the layer may call `apply` and let the next layer's `FusedInputQuantization` activate.
        """
        return type(self).apply_gated is not LinearKernel.apply_gated

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """What quantizes this kernel's input in the preceding kernel. None: this kernel takes tensors only."""
        return None

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """The matrix products whose implementation is to be chosen by measurement on the GPU.

        weights, bias: as in `apply`.
        """
        return ()


class QuantMethod(ABC, Generic[OptionsT]):
    """A quantization method: how weights are stored in the checkpoint and multiplied.

    The type parameter is the type of `from_checkpoint`'s options; a subclass need not give it.
    """

    api: ClassVar[str]
    """Version of this contract that the method implements (`API`)."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the method's settings (quant.options). None: it has none."""

    @classmethod
    @abstractmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Return a refusal: why the method cannot serve this, and what would work. None: it can.

        checkpoint: quantization_config of the model's config.json; None for an unquantized checkpoint.
        """

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: OptionsT) -> QuantMethod[OptionsT]:
        """Make an instance for a checkpoint. For None, one that quantizes while loading.

        checkpoint: as in `refuses`. options: an instance of options_class; None where that is None.
        """

    @classmethod
    def kv_dtype(cls, checkpoint: Mapping[str, Any] | None) -> str | None:
        """The dtype of keys and values that the checkpoint asks for. None: the checkpoint leaves it open.

        checkpoint: as in `refuses`, which has not refused it.
        """
        return None

    def kv_scales(self, attention: str) -> KVScaleNames | None:
        """Names of the tensors that may hold the KV cache's scales. None: the checkpoint has none.

        attention: qualified name of the attention layer in the checkpoint, as model.layers.0.self_attn.
        """
        return None

    def ignored(self) -> Sequence[str]:
        """Patterns (fnmatch: `*.name`) of tensors that the checkpoint may have and that are not read."""
        return ()

    @abstractmethod
    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """Make the kernel of one linear layer. None: the layer is not quantized, and core's own kernel computes it.

        May be called twice for a layer of a checkpoint with older names: by the checkpoint's name, then by the present
        one.
        """

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        """Make the kernel of the output layer, as for a linear layer. None: the output layer is not quantized.

        Called for models whose output layer has a weight of its own. Column-parallel ranks hold equal numbers of the
        vocabulary's tokens.
        """
        return None

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """Make the kernel of one layer's experts. None: they are not quantized, and core's own kernel computes them."""
        return None
