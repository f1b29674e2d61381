"""The output layer: hidden states to logits, or to the token with the largest logit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from attrs import frozen

from engine.core.errors import ConfigError
from engine.core.layers.base import Layer
from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.matmul import compiled_shapes, multiply, pack
from engine.core.quant.base import TensorSpec

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.linear import Linear

MAX_VOCAB_SIZE = 2**24
"""For vocab-parallel ranks, which exchange tokens as float32: float32 holds every integer up to here."""


Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Logits [rows, columns] to the max logit of each row, and its column."""


class OutputLayer(Protocol):
    """A model's output layer, from LayerFactory.lm_head."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] -> logits [rows, vocab_size]."""

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The max logit of each row ([rows] float32) and its token ([rows] int64); the first token of equal logits.

        The logits are those of `__call__`, rounded to its dtype. hidden: [rows, hidden_size]. A row with a NaN logit
        has the max logit NaN and an arbitrary token.
        """


def plain_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Max logit per row, [rows] float32 (NaN where any is NaN), and its column, [rows] int64: the first of equals."""
    max_logits, tokens = logits.max(dim=-1)
    return max_logits.float(), tokens


class AdjustedHead(OutputLayer):
    """An output layer whose logits are scaled, or soft-capped, or both."""

    def __init__(self, head: OutputLayer, argmax: Argmax, *, scale: float = 1.0, softcap: float | None = None) -> None:
        """scale: factor on the logits. softcap: logits then become softcap * tanh(logit / softcap). argmax: as
        `plain_argmax`.
        """
        self._head = head
        self._argmax = argmax
        self._scale = scale
        self._softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """As OutputLayer; of this rank's tokens if the head is this rank's."""
        logits = self._head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap).mul_(self._softcap)
        return logits

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Of the adjusted logits: the adjustment may round two different logits to one number.
        return self._argmax(self(hidden))


class LMHead(Layer):
    """Multiplies by an embedding table: the model's own (tied) or one for the head alone."""

    _weight: torch.Tensor

    def __init__(self, table: Embedding) -> None:
        """table: filled by the loader before the head."""
        self.table = table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the table's tokens: [rows, tokens of the table]."""
        return multiply(hidden, self._weight)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As OutputLayer.greedy over the table's tokens, numbered from the table's first."""
        return plain_argmax(self(hidden))

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self._weight = pack(self.table.weight)

    @property
    def nbytes(self) -> int:
        """Bytes beyond the table's: a CPU packs a copy for the head."""
        filled = hasattr(self, "_weight") and self._weight is not self.table.weight
        return self.table.nbytes if filled else 0

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        return compiled_shapes(self._weight)


class LinearHead(OutputLayer):
    """The output layer as a linear layer by any kernel, for quantized weights."""

    def __init__(self, linear: Linear, argmax: Argmax) -> None:
        """linear: without a reduction. argmax: as `plain_argmax`."""
        self.linear = linear
        self._argmax = argmax

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's tokens."""
        return self.linear(hidden)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._argmax(self.linear(hidden))


@frozen(kw_only=True, eq=False)
class VocabShards:
    """How ranks share a vocabulary: contiguous ranges of tokens."""

    group: RankGroup
    vocab_size: int
    shard_size: int
    """Tokens per rank; the last rank may have fewer."""

    @classmethod
    def of(cls, table: VocabParallelEmbedding) -> VocabShards:
        """The shards of an embedding."""
        return cls(group=table.group, vocab_size=table.shape[0], shard_size=table.shard_size)

    @property
    def first_token(self) -> int:
        """The first token of this rank."""
        return self.group.rank * self.shard_size


class VocabParallelHead(OutputLayer):
    """The output layer of vocab-parallel ranks. Every rank has the results for the whole vocabulary."""

    def __init__(self, local: OutputLayer, shards: VocabShards) -> None:
        """local: this rank's head, of its shard. Raises ConfigError if the vocabulary is too large."""
        self._local = local
        self._shards = shards
        self._group = shards.group
        self._vocab_size = shards.vocab_size
        if self._vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"ranks share a vocabulary of {MAX_VOCAB_SIZE} tokens at most; this one is {self._vocab_size}"
            )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, shard_size = self._local(hidden), self._shards.shard_size
        if logits.shape[1] < shard_size:
            logits = F.pad(logits, (0, shard_size - logits.shape[1]))
        parts = list(self._group.all_gather(logits))
        parts[-1] = parts[-1][:, : self._vocab_size - shard_size * (len(parts) - 1)]
        return torch.cat(parts, 1)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Ranks exchange a few bytes per row as an all-reduce in which each rank fills its own slot and leaves zeros
        # elsewhere: the sums are exact, and small all-reduces have fast kernels.
        return self._choose(self._group.all_reduce(self._place(*self._local.greedy(hidden))))

    def _place(self, max_logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[ranks, rows, 2] float32: this rank's max logits and tokens in its slot, zeros in the others."""
        slots = max_logits.new_zeros((self._group.ranks, len(max_logits), 2))
        tokens = (tokens + self._shards.first_token).to(max_logits.dtype)
        torch.stack((max_logits, tokens), 1, out=slots[self._group.rank])
        return slots

    def _choose(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's max logit and its token, the first of equal logits. candidates: [ranks, rows, 2]."""
        max_logits, ranks = candidates[..., 0].max(0)
        return max_logits, candidates[..., 1].gather(0, ranks[None])[0].long()
