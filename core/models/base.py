"""Contract of plugins/models: a model architecture, built from a Hugging Face config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen

from engine.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from engine.core.layers import LayerFactory
    from engine.core.models.forward_pass import ForwardPass

API = "2"
"""Version of this contract. "2": attention sinks and layer_caches in ModelSpec."""


@frozen(kw_only=True)
class KVShape:
    """The attention of one layer whose keys and values are cached. Numbers of heads are over all ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    """Size of a value; None: head_dim."""
    latent: bool = False
    """Whether a value is the first `value_head_dim` numbers of its key, so that only keys are cached (MLA). Every rank
    caches the key and value heads of all ranks."""
    scale: float | None = None
    """Factor on q.k before the softmax; None: ModelSpec.scale."""


@frozen(kw_only=True)
class StateShape:
    """A layer that keeps a state of constant size per sequence instead of keys and values: linear attention, Mamba."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """(shape, dtype) of each tensor of one sequence's state, over all ranks, which shard the first dimension evenly."""
    replicated: tuple[bool, ...] = ()
    """Per tensor: whether every rank keeps all of it, as of hidden states. Empty: all tensors are sharded."""

    def __attrs_post_init__(self) -> None:
        if self.replicated and len(self.replicated) != len(self.tensors):
            raise TypeError(f"StateShape has {len(self.tensors)} tensors and replicated of {len(self.replicated)}")

    @property
    def sharded_sizes(self) -> frozenset[int]:
        """First dimensions of the tensors that the ranks shard, over all ranks."""
        return frozenset(shape[0] for shape, _, is_whole in self._parts() if not is_whole)

    def on_rank(self, ranks: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of each tensor of one sequence's state on one of `ranks` ranks."""
        return tuple(
            (shape if is_whole else (shape[0] // ranks, *shape[1:]), dtype) for shape, dtype, is_whole in self._parts()
        )

    def _parts(self) -> Iterator[tuple[tuple[int, ...], str, bool]]:
        """(shape, dtype, whether every rank keeps all of it) of each tensor."""
        replicated = self.replicated or (False,) * len(self.tensors)
        return ((*tensor, is_whole) for tensor, is_whole in zip(self.tensors, replicated, strict=True))


@frozen(kw_only=True)
class ModelSpec:
    """The properties of a model that core needs before the model is built.

    A model whose layers all keep a state leaves out num_heads, num_kv_heads, head_dim and scale; all others give them.
    Raises CheckpointError if the key and value heads do not divide the query heads, or the soft cap is not above 0.
    """

    num_layers: int
    num_heads: int = 0
    """Query heads, over all ranks."""
    num_kv_heads: int = 0
    """Key and value heads, over all ranks."""
    head_dim: int = 0
    """Numbers per head, of queries, keys and values alike, unless `layer_caches` says otherwise."""
    hidden_size: int
    vocab_size: int
    max_len: int
    """Longest context that the model was trained for, tokens."""
    extended_max_len: int = 0
    """Longest context that --max-len may ask for, where that exceeds `max_len`, as with dynamic rope scaling."""
    sliding_windows: tuple[int | None, ...] = field()
    """Per layer: the number of tokens that a token attends to, itself included; None: the whole context. By default
    None for each."""
    scale: float = 0.0
    """Factor on q.k before the softmax."""
    softcap: float | None = None
    """Attention scores become softcap * tanh(score / softcap). None: unchanged."""
    layer_caches: tuple[KVShape | StateShape, ...] = ()
    """What each layer caches; empty: all layers have the number and size of heads given above."""
    sinks: tuple[bool, ...] = ()
    """Per layer: whether its attention has sinks (`LayerFactory.attention`). Empty: none has."""

    @sliding_windows.default
    def _no_windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_layers

    def __attrs_post_init__(self) -> None:
        if self.has_attention:
            missing = [name for name in ("num_heads", "num_kv_heads", "head_dim", "scale") if not getattr(self, name)]
            if missing:
                raise TypeError(f"ModelSpec of a model with attention layers lacks {', '.join(missing)}")
        if not self.layer_caches and self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json has {self.num_heads} attention heads and {self.num_kv_heads} key and value heads; their"
                " number must divide that of attention heads"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise CheckpointError(f"config.json has a soft cap of attention scores of {self.softcap}; it must exceed 0")

    @property
    def has_attention(self) -> bool:
        """Whether any layer caches keys and values; else all layers keep a state."""
        return not self.layer_caches or any(isinstance(cache, KVShape) for cache in self.layer_caches)


class Model(ABC):
    """A network built of layers from a LayerFactory, under the names of the checkpoint's tensors.

    It holds no batch and no state between forward passes.
    """

    api: ClassVar[str]
    """Version of this contract that the model implements (`API`)."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the model's settings. None: it has none."""
    no_graphs: str | None = None
    """Why `forward` cannot be captured in CUDA graphs, as a clause that follows the model's name; None: it can. An
    instance may set `no_graphs` in its constructor."""

    @classmethod
    @abstractmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Return a refusal: why this class cannot build this model, and what would work. None: it can.

        config: the content of config.json, here and below.
        """

    @classmethod
    def unknown_keys(cls, config: Mapping[str, Any]) -> Sequence[str]:
        """Keys of config.json that this class knows nothing of, for a warning; in a table, as TABLE.KEY.

        A key belongs here unless the class computes with the key, refuses some of its values, or knows that the key
        changes no logits.
        """
        return ()

    @classmethod
    @abstractmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The properties of the model of this config.json.

        Raises CheckpointError if a key is missing, as `engine.core.weights.read_key` does.
        """

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        """Make the layers. The loader fills them afterwards.

        options: an instance of options_class; None where that is None.
        """

    @abstractmethod
    def forward(self, run: ForwardPass) -> torch.Tensor:
        """Hidden states of the batch's tokens before the LM head: [tokens, hidden_size].

        May be captured in CUDA graphs, with a graph break at each call of `run.attention.forward`. So a model must not
        synchronize with the device, and may use only tokens, positions and slots of the batch; attention uses the rest.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows of hidden states: [rows, hidden_size] -> [rows, vocab_size]."""

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The max logit of each row ([rows] float32) and its token ([rows] int64); the first token of equal logits.

        hidden: [rows, hidden_size]. A row with a NaN logit has the max logit NaN and an arbitrary token. Override
        `greedy` where the output layer finds the token without keeping logits (OutputLayer.greedy). An override must
        compare the numbers that `logits` returns, rounded to the model's dtype, so that a sequence's greedy token does
        not depend on the rest of the batch.
        """
        max_logits, tokens = self.logits(hidden).max(dim=-1)
        return max_logits.float(), tokens
