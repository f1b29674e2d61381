"""Makes the token embedding and the output layer of a model, vocab-parallel on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.lm_head import AdjustedHead, LinearHead, OutputLayer, VocabShards
from engine.core.layers.rank_shards import RankShards

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.base import Layer
    from engine.core.layers.checkpoint_names import CheckpointNames
    from engine.core.layers.layer_classes import LayerClasses
    from engine.core.layers.linear import Linear
    from engine.core.layers.linear_layers import LinearLayers


class VocabLayers:
    """Makes the layers of a model that have a row per token of the vocabulary."""

    def __init__(
        self,
        *,
        dtype: str,
        group: RankGroup,
        names: CheckpointNames,
        classes: LayerClasses,
        linear_layers: LinearLayers,
        layers: list[Layer],
    ) -> None:
        """layers: to which the layers that are made are appended, for the loader."""
        self.token_embedding: Embedding | None = None
        """The embedding of tokens: the first that was made."""
        self.head_linears: list[Linear] = []
        """The linear layers that are output layers."""
        self._dtype = dtype
        self._group = group
        self._names = names
        self._classes = classes
        self._linear_layers = linear_layers
        self._layers = layers

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> Embedding:
        """Make an embedding. scale: factor on its vectors."""
        weight = f"{name}.weight"
        made: Embedding
        if self._group.ranks == 1:
            made = Embedding(weight, vocab_size, hidden_size, self._dtype, scale=scale)
        else:
            made = self._classes.vocab_parallel_embedding(
                weight, vocab_size, hidden_size, self._dtype, self._group, scale=scale
            )
        self.token_embedding = self.token_embedding or made
        self._layers.append(made)
        return made

    def lm_head(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: Embedding | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> OutputLayer:
        """Make an output layer; the arguments are as in LayerFactory.lm_head."""
        head: OutputLayer | None = None
        shards: VocabShards | None = None
        if tied is None:
            head, shards = self._quantized_head(name, vocab_size, hidden_size)
        else:
            self._names.ignored.append(f"{name}.weight")
            self._names.tied[f"{name}.weight"] = next(iter(tied.tensors()))
        if head is None:
            table = tied or self.embedding(name, vocab_size, hidden_size)
            head = plain = self._classes.lm_head(table)
            self._layers.append(plain)
            shards = VocabShards.of(table) if isinstance(table, VocabParallelEmbedding) else None
        if scale != 1.0 or softcap is not None:
            head = AdjustedHead(head, self._classes.argmax, scale=scale, softcap=softcap)
        return head if shards is None else self._classes.vocab_parallel_head(head, shards)

    def _quantized_head(
        self, name: str, vocab_size: int, hidden_size: int
    ) -> tuple[OutputLayer | None, VocabShards | None]:
        """The output layer of this rank's tokens by a kernel of the quantization method, and how ranks share them.

        None: the output layer is not quantized; one rank has all tokens.
        """
        linear = self._linear_layers.make_head(name, vocab_size, hidden_size)
        if linear is None:
            return None, None
        shard = RankShards(self._group.ranks).shard(vocab_size, f"outputs of {name}, which are quantized,")
        self.head_linears.append(linear)
        self._layers.append(linear)
        head = LinearHead(linear, self._classes.argmax)
        if self._group.ranks == 1:
            return head, None
        return head, VocabShards(group=self._group, vocab_size=vocab_size, shard_size=shard)
