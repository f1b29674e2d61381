"""Contract of plugins/attention: how queries meet the paged KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, frozen

if TYPE_CHECKING:
    import torch

    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool
    from engine.core.device import DeviceInfo

API = "1"
"""Version of this contract. A backend names the version it was written for in `api`."""
LAYOUTS = ("NHD",)
"""What `kv_layout` may be."""
GRAPHS = ("none", "decode", "any")
"""What `graphs` may be."""


@frozen(kw_only=True)
class AttentionSpec:
    """What the model asks of its attention. Later versions may add fields with defaults."""

    num_layers: int
    num_heads: int
    """Query heads on this device."""
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q.k before the softmax."""
    dtype: str
    """Of queries and outputs: float32, bfloat16 or float16."""
    kv_dtype: str
    """Of keys and values in the cache: as dtype, or float8_e4m3fn for codes (kv_scales)."""
    block_size: int
    """Tokens a KV block."""
    max_len: int
    """Longest context, tokens."""
    sliding_windows: tuple[int | None, ...]
    """For each layer: a token sees itself and the window - 1 tokens before it; None: all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""

    @property
    def page_size(self) -> int:
        """`block_size` under its first name, for plugins that use it."""
        return self.block_size


@define
class GraphSlot:
    """A batch shape for which device buffers are fixed, so that a captured graph can be replayed."""

    num_sequences: int


Plan = Any
"""What a backend prepares once a step; opaque to core."""


class AttentionBackend(ABC):
    """Computes attention over the paged KV cache.

    The pool's tensors have the layout `kv_layout` names ("NHD": [blocks, block_size, kv_heads, head_dim] for each layer
    and each of keys and values). Core has rotated q and k and written k and v into the pool before `forward`. A backend
    never writes to the pool and never reads a slot beyond a sequence's context length: what is there may be NaN.

    In a pool of float8 a key is its code times pool.scales[layer].key, a value its code times pool.scales[layer].value
    (elsewhere both are 1): the first may be a factor of `scale`, the second of the result.
    """

    api: ClassVar[str]
    kv_layout: ClassVar[str] = "NHD"
    graphs: str = "none"
    """Which batches may be captured in a CUDA graph: none, decode or any. The class says what it can do at best; an
    instance sets its own where that depends on the spec, and the runner asks the instance."""
    block_sizes: ClassVar[tuple[int, ...] | None] = None
    """Page sizes it can read, a tuple with the preferred one first; None: any."""
    reads_float8: ClassVar[bool] = False
    """Whether it reads a float8 cache, by pool.scales; one that does not is not asked to."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([attention.options]); None: it has none."""

    @classmethod
    @abstractmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """A sentence that says why this backend cannot serve `spec` on `device` and what would work; None if it can."""

    @abstractmethod
    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        """Keep what `forward` needs; `options` is an instance of `options_class` (None without one)."""

    @abstractmethod
    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Plan:
        """Prepare what all layers share for this batch; called once an iteration of a step, before its first `forward`.

        The batch is read and never written. Without `graph` a plan serves until the next one is made; with it, for as
        long as the engine runs, whatever is planned and computed in between.
        """

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Attention of one layer, causal within each sequence.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], the new tokens' own, already in the pool.
        They may be strided views; the last two dimensions are dense. Returns [tokens, heads, head_dim] in q's dtype.
        """

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, out: torch.Tensor
    ) -> None:
        """As `forward`, with the result in `out`: [tokens, heads, head_dim], dense, of q's dtype.

        Called where two backends share a batch (`attention_pair`) and between recorded pieces of a step (`pieces`); a
        backend that can write there saves the copy.
        """
        out.copy_(self.forward(layer, q, k, v, plan))


def flaw(cls: type[AttentionBackend]) -> str | None:
    """What the class says of itself that nobody would honour, and what would be; None if there is nothing."""
    if cls.kv_layout not in LAYOUTS:
        return f"kv_layout = {cls.kv_layout!r}, but the KV cache is laid out as {' or '.join(LAYOUTS)} only; read that"
    if cls.graphs not in GRAPHS:
        return f"graphs = {cls.graphs!r}; it must be one of {', '.join(GRAPHS)}"
    sizes = cls.block_sizes
    if sizes is not None and not (isinstance(sizes, tuple) and sizes and all(type(size) is int for size in sizes)):
        return f"block_sizes = {sizes!r}; it must be a tuple of numbers, as (16, 32), or None for any"
    return None


def window_of(spec: AttentionSpec) -> Mapping[int | None, tuple[int, ...]]:
    """Layers by sliding window, so that a backend plans once a window and not once a layer."""
    groups: dict[int | None, list[int]] = {}
    for layer, window in enumerate(spec.sliding_windows):
        groups.setdefault(window, []).append(layer)
    return {window: tuple(layers) for window, layers in groups.items()}
