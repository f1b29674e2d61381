"""Where a model gets its layers from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.core.errors import ConfigError
from engine.core.layers.attention import Attention
from engine.core.layers.base import Layer, torch_dtype
from engine.core.layers.embedding import Embedding
from engine.core.layers.kv_scales import KVScaleReader
from engine.core.layers.linear import Linear, Reduce
from engine.core.layers.lm_head import LMHead
from engine.core.layers.norm import HeadNorm, RMSNorm
from engine.core.layers.plain import PlainLayers
from engine.core.layers.rotary import RotaryEmbedding, RotarySpec
from engine.core.quant import LinearPart, LinearSpec, QuantMethod

L = TypeVar("L", bound=Layer)


class LayerFactory:
    """Makes a model's layers for one rank and notes them for the loader. Names are those of the checkpoint's tensors.

    The model decides what a layer is; the factory decides in which type, on which device, by which kernel and how much
    of it this rank holds.
    """

    def __init__(
        self,
        *,
        dtype: str,
        device: str,
        quant: QuantMethod | None = None,
        rank: int = 0,
        ranks: int = 1,
        reduce: Reduce | None = None,
        fused: bool = False,
    ) -> None:
        """`reduce` sums a tensor over all ranks. `fused`: layers by Triton kernels (fused.py), where there are such.

        Raises ConfigError if `reduce` is missing with several ranks.
        """
        if ranks > 1 and reduce is None:
            raise ConfigError(f"{ranks} ranks share this model, but nothing was given to sum their results with")
        torch_dtype(dtype)
        self.dtype = dtype
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self.layers: list[Layer] = []
        self.ignored: list[str] = [] if quant is None else list(quant.ignored())
        self.kv_scales: list[KVScaleReader] = []
        """Of the attention layers whose KV scales the checkpoint may have."""
        self._quant = quant
        self._reduce = reduce
        kinds: type[PlainLayers] = PlainLayers
        if fused:
            from engine.core.layers.fused import FusedLayers

            kinds = FusedLayers
        self._kinds = kinds(dtype, device, ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights kept on this rank."""
        return sum(layer.nbytes for layer in self.layers)

    def ignore(self, pattern: str) -> None:
        """Tensors whose name matches (as file names do: `*.name`) may be in the checkpoint and are not read."""
        self.ignored.append(pattern)

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total`. Raises ConfigError, naming `what`, if the ranks cannot share it evenly."""
        if total % self.ranks:
            raise ConfigError(f"{self.ranks} ranks cannot share {total} {what} evenly; use a number that divides it")
        return total // self.ranks

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        parallel: str = "none",
        gated: bool = False,
    ) -> Linear:
        """A linear layer.

        parts: (name, outputs) of each of the checkpoint's layers to merge: their outputs come side by side.
        parallel: column (a rank has some outputs of each part), row (some inputs; the results are summed) or none.
        gated: the two parts are gate and up projections of one size, and the layer is called by `gated` alone.
        Sizes are over all ranks.
        """
        spec = LinearSpec(
            parts=tuple(LinearPart(name=name, out_features=outputs) for name, outputs in parts),
            in_features=in_features,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=parallel,
            gated=gated,
        )
        if parallel == "column":
            for name, outputs in parts:
                self.share(outputs, f"outputs of {name}")
        if parallel == "row":
            self.share(in_features, f"inputs of {parts[0][0]}")
        kernel = self._quant.linear(spec) if self._quant is not None else None
        reduce = self._reduce if parallel == "row" else None
        return self._note(Linear(spec, kernel or self._kinds.kernel(spec), reduce, self._kinds.activate))

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """A table of vectors."""
        return self._note(Embedding(f"{name}.weight", (vocab_size, hidden_size), self.dtype))

    def lm_head(self, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None = None) -> LMHead:
        """The output layer. With `tied` it multiplies by that table, and a copy in the checkpoint is not read."""
        if tied is not None:
            self.ignore(f"{name}.weight")
        return self._note(self._kinds.lm_head(tied or self.embedding(name, vocab_size, hidden_size)))

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """A norm over the hidden size."""
        return self._note(self._kinds.norm(f"{name}.weight", size, eps))

    def head_norm(self, parts: Sequence[tuple[str, int]], head_dim: int, eps: float) -> HeadNorm:
        """A norm over each head; parts: (name, this rank's heads)."""
        named = tuple((f"{name}.weight", heads) for name, heads in parts)
        return self._note(HeadNorm(named, head_dim, eps, self.dtype))

    def rotary(self, spec: RotarySpec) -> RotaryEmbedding:
        """A rotary embedding. Older checkpoints store its frequencies; they are not read."""
        self.ignore("*.rotary_emb.inv_freq")
        return self._kinds.rotary(spec)

    def attention(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, norm: HeadNorm | None = None, name: str = ""
    ) -> Attention:
        """Attention of one layer, with a norm of queries and keys if given. The numbers of heads are this rank's.

        name: of the module in the checkpoint, for scales of a quantized KV cache; without it they are not read.
        """
        names = self._quant.kv_scales(name) if self._quant is not None and name else None
        if names is not None:
            self.kv_scales.append(self._note(KVScaleReader(layer, names)))
        return self._kinds.attention(layer, num_heads, num_kv_heads, head_dim, norm)

    def _note(self, layer: L) -> L:
        self.layers.append(layer)
        return layer
