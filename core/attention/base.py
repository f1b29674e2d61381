"""Contract of an attention backend: computes attention over the paged KV cache.

A backend derives from AttentionBackend. It may import what the folders of core export in their `__init__` (for example
`from engine.core.attention import AttentionBackend, ForwardBatch, KVPool`), the modules directly in core (hooks,
errors, types, device, startup), and the kernels in engine.ops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

from attrs import define, frozen

if TYPE_CHECKING:
    import torch

    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool
    from engine.core.device import DeviceInfo

API = "2"
"""Version of this contract, which a backend names in `api`. "2": attention sinks, values of another size than keys."""

KVLayout = Literal["NHD"]
"""Layout of the KV cache's tensors; NHD: [blocks, block_size, kv_heads, head_dim]."""
GraphSupport = Literal["none", "decode", "any"]
"""Which batches a backend supports in CUDA graphs: none, decode batches, or any batch."""

OptionsT = TypeVar("OptionsT")
PlanT = TypeVar("PlanT")


@frozen(kw_only=True)
class AttentionSpec:
    """Shapes and types of a model's attention on one device. Later versions may add fields with defaults."""

    num_layers: int
    num_heads: int
    """Query heads on this device."""
    num_kv_heads: int
    """Key and value heads on this device."""
    head_dim: int
    scale: float
    """Factor on q.k before the softmax."""
    dtype: str
    """Type of queries and outputs: float32, bfloat16 or float16."""
    kv_dtype: str
    """Type of the KV cache: `dtype`, or float8_e4m3fn for quantized values (KVPool.scales)."""
    block_size: int
    """Tokens per KV block."""
    max_len: int
    """Maximum context length, tokens."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: the number of tokens that a token attends to, itself included; None: the whole context."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: no soft cap."""
    value_head_dim: int | None = None
    """Size of a value and of a head's output; None: head_dim."""
    latent: bool = False
    """Whether a value is the first `value_head_dim` numbers of its key, so that the cache holds keys only (MLA)."""
    sinks: tuple[bool, ...] = ()
    """Per layer: whether its query heads have attention sinks, which `AttentionBackend.set_sinks` sets. Empty: none."""

    @property
    def output_dim(self) -> int:
        """Size of a value and of a head's output."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def numbers_per_token(self) -> tuple[int, int]:
        """How many numbers a layer caches per token, of keys and of values."""
        return self.num_kv_heads * self.head_dim, 0 if self.latent else self.num_kv_heads * self.output_dim

    @property
    def page_size(self) -> int:
        """The former name of `block_size`, kept for older plugins."""
        return self.block_size


@define
class GraphSlot:
    """Batch shape of one CUDA graph, whose device buffers stay the same from replay to replay."""

    num_sequences: int
    """Sequences of the batch, padding included."""


@frozen(kw_only=True)
class HeadRotation:
    """What happens to the projections of a layer before attention: see AttentionBackend.rotate_and_forward."""

    cos: torch.Tensor | None
    """[tokens, rotary_dim / 2] float32, dense; None: queries and keys are not rotated."""
    sin: torch.Tensor | None
    """The same of the sines."""
    norm_weight: torch.Tensor | None = None
    """[heads + kv_heads, head_dim], of any dtype: weights of the norm of each head of queries and keys, before the
    rotation; None: no norm."""
    norm_eps: float = 0.0
    interleaved: bool = False
    """Whether dimension 2 i rotates with 2 i + 1, not i with i + rotary_dim / 2. Later dimensions do not rotate."""


class AttentionBackend(ABC, Generic[OptionsT, PlanT]):
    """Computes causal attention over the paged KV cache.

    OptionsT: the backend's own settings; PlanT: the result of `plan`, opaque to core.

    A backend serves one cache group: layers of one shape that share block tables. Layers count from 0 in each group. A
    model of several groups has an instance per group.

    A KVPool holds keys and values per layer in the layout `kv_layout`; NHD is [blocks, block_size, kv_heads, head_dim].
    Before `forward`, core has rotated q and k and has written k and v of the whole batch into the pool; the context of
    a sequence may include blocks that another sequence of the batch has just written. A backend must not write to the
    pool, except in `rotate_and_forward`.

    No result may depend on slots beyond a sequence's context length, nor on blocks of which no query's sliding
    window covers any slot: both may hold NaN, and may belong to other sequences. A weight of 0 does not cancel a NaN,
    so a backend should not read such values.

    A float8 pool holds quantized values. A key is its quantized value times pool.scales[layer].key; a value is its
    quantized value times pool.scales[layer].value. Both scales are 1 in other pools. The key scale may be multiplied
    into `scale`, the value scale into the output.
    """

    api: ClassVar[str]
    """Version of the contract that the class was written for."""
    kv_layout: ClassVar[KVLayout] = "NHD"
    """Layout of the KV cache that the backend reads; NHD is the only one."""
    graphs: GraphSupport = "none"
    """Which batches may be captured in a CUDA graph: none, decode (decode batches) or any. The class states the
    maximum; an instance may set less, depending on the spec. The runner asks the instance."""
    block_sizes: ClassVar[tuple[int, ...] | None] = None
    """KV block sizes that the backend can read, the preferred one first; None: any."""
    reads_float8: ClassVar[bool] = False
    """Whether the backend reads a float8 cache, with pool.scales; if not, it is never given one."""
    reads_latent: ClassVar[bool] = False
    """Whether the backend reads a cache whose values have another size than keys or are a part of them
    (AttentionSpec.value_head_dim, latent); if not, it is never given one. A latent cache is never in float8."""
    reads_sinks: ClassVar[bool] = False
    """Whether the backend computes attention sinks (`set_sinks`); if not, it is never given a model that has them."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([attention.options]); None: no settings."""

    @classmethod
    @abstractmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """Return a sentence that says why it cannot serve `spec` on `device` and what would work; None if it can."""

    @abstractmethod
    def __init__(self, spec: AttentionSpec, pool: KVPool, options: OptionsT) -> None:
        """Keep what `forward` needs and allocate workspaces.

        options: an instance of `options_class`, None without one.
        """

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        """Keep the attention sinks of a model that has them. Called once, before `plan`.

        sinks: per layer, [heads] float32 of this device's query heads; None for a layer without sinks. A head's sink is
        the score, neither scaled nor capped, of one more key, whose value is zero and which every query sees. So the
        weights of a query's keys are exp(score) / (exp(sink) + the sum of exp(score) over its keys).
        """
        raise NotImplementedError(f"{type(self).__qualname__} has reads_sinks = {self.reads_sinks} and no set_sinks()")

    @abstractmethod
    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> PlanT:
        """Prepare what all layers share for `batch`; called once per forward pass, before the layers.

        The batch must not be written to. Without `graph`, a plan is used until the next one is made. With `graph`, it
        is used as long as the engine runs, whatever is planned and computed in between.
        """

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlanT) -> torch.Tensor:
        """Compute the attention of one layer, causal within each sequence.

        q: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim] and v: [tokens, kv_heads, spec.output_dim] of the
        new tokens, which are in the pool already. All three may be strided views whose last two dimensions are dense.
        Returns [tokens, heads, spec.output_dim] in the dtype of q.
        """

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlanT, out: torch.Tensor
    ) -> None:
        """Compute `forward` into `out`: [tokens, heads, spec.output_dim], dense, in the dtype of q.

        Called where two backends share a batch (`--attention PREFILL,DECODE`) and at the graph breaks of piecewise CUDA
        graphs. Override to save the copy.
        """
        out.copy_(self.forward(layer, q, k, v, plan))

    def rotate_and_forward(
        self, layer: int, qkv: torch.Tensor, rotation: HeadRotation, plan: PlanT
    ) -> torch.Tensor | None:
        """Norm and rotate queries and keys, write keys and values to the pool, and compute `forward`, all in one.

        Optional; None, as here: the backend has done nothing, and core does all of this before it calls `forward`. May
        be None for some plans, layers or rotations only.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], dense, the projections of the new tokens: queries, keys and
        values, which may be overwritten. Keys and values are written to `batch.slots` of the planned batch, as KVPool
        describes. If `batch.rows_share_sequences`, a row may see keys that the call writes for other rows.
        """
        return None


def contract_error(cls: type[AttentionBackend[Any, Any]]) -> str | None:
    """Return what is wrong with the attributes that `cls` declares, and what would be right; None if nothing is."""
    layouts, graphs = get_args(KVLayout), get_args(GraphSupport)
    if cls.kv_layout not in layouts:
        return f"kv_layout = {cls.kv_layout!r}, but the KV cache is laid out as {' or '.join(layouts)} only; use that"
    if cls.graphs not in graphs:
        return f"graphs = {cls.graphs!r}; it must be one of {', '.join(graphs)}"
    sizes = cls.block_sizes
    if sizes is not None and not (isinstance(sizes, tuple) and sizes and all(type(size) is int for size in sizes)):
        return f"block_sizes = {sizes!r}; it must be a tuple of numbers, as (16, 32), or None for any"
    return None


def layers_by_window(spec: AttentionSpec) -> Mapping[int | None, tuple[int, ...]]:
    """Group the layers by sliding window: window -> its layers, so that a backend can plan once per window."""
    groups: dict[int | None, list[int]] = {}
    for layer, window in enumerate(spec.sliding_windows):
        groups.setdefault(window, []).append(layer)
    return {window: tuple(layers) for window, layers in groups.items()}
