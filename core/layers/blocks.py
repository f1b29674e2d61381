"""Composite layers: the attention block and the gated MLP of a decoder layer, each with its norms.

They hide what makes their layers fast together: norm and activation quantize the input of the next linear layer, and
the result stays a `PartialSum`, which the next norm reduces over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from engine.core.distributed.partial_sum import PartialSum, SplitSum
from engine.core.distributed.scattered_rows import whole_rows
from engine.core.distributed.scattered_sum import scattered_chunks
from engine.core.layers.linear import PartialLinear
from engine.core.layers.normed_parts import NormedParts

if TYPE_CHECKING:
    from engine.core.distributed.overlapped_sums import OverlappedSums
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.attention import Attention, GroupedAttention
    from engine.core.layers.linear import Linear, TensorOrQuantized
    from engine.core.layers.norm import Norm, ResidualAddition
    from engine.core.layers.rotary import Angles
    from engine.core.models.forward_pass import ForwardPass


class OutputProjection(Protocol):
    """The last layer of a block: a PartialLinear, or one of the layers below around it."""

    linear: Linear

    def __call__(self, x: TensorOrQuantized) -> torch.Tensor | PartialSum:
        """x: [..., this rank's in_features] -> [..., out_features]."""


class ScaledPartialLinear(PartialLinear):
    """A PartialLinear whose result is multiplied by a number."""

    def __init__(self, linear: Linear, group: RankGroup, scale: float) -> None:
        super().__init__(linear, group)
        self._scale = scale

    def __call__(self, x: TensorOrQuantized) -> PartialSum:
        return PartialSum(self.linear(x) * self._scale, self._group)


class NormedLinear:
    """A PartialLinear and a norm of its result, which reduces over the ranks."""

    def __init__(self, partial: PartialLinear, norm: Norm) -> None:
        self.linear = partial.linear
        self._partial = partial
        self._norm = norm

    def __call__(self, x: TensorOrQuantized) -> torch.Tensor:
        """x: [..., this rank's in_features] -> [..., out_features]."""
        return self._norm(self._partial(x))[0]


class SplitOutput:
    """A PartialLinear by chunks of rows, each of which is summed over the ranks while the next chunk is computed."""

    def __init__(self, output: PartialLinear, group: RankGroup, sums: OverlappedSums) -> None:
        self.linear = output.linear
        self._output = output
        self._group = group
        self._sums = sums

    def __call__(self, x: TensorOrQuantized) -> PartialSum:
        """x: [..., this rank's in_features] -> [..., out_features]; in chunks if x has enough rows."""
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            return self._output(x)
        first = self._sums.split(x.shape[0])
        return self._output(x) if first is None else self.by_chunk((x[:first], x[first:]))

    def by_chunk(self, chunks: Iterable[TensorOrQuantized]) -> SplitSum:
        """The outputs of chunks of rows. The computation of a chunk starts behind that of the one before."""
        return SplitSum([self._sums.start(self._output(x).addend) for x in chunks], self._group)


def normed_chunks(
    norm: Norm | ResidualAddition, linear: Linear, hidden: SplitSum, residual: torch.Tensor | None
) -> NormedChunks | NormedParts:
    """The norms of a sum by chunks. linear: for which the norm is computed. residual: as for the norm."""
    scattered = scattered_chunks(hidden)
    if scattered is not None:
        return NormedParts(norm, linear, scattered, residual, hidden.group)
    return NormedChunks(norm, linear, hidden, whole_rows(residual))


class NormedChunks:
    """A norm of each chunk of rows of a SplitSum, when it is asked for."""

    def __init__(
        self, norm: Norm | ResidualAddition, linear: Linear, hidden: SplitSum, residual: torch.Tensor | None
    ) -> None:
        """linear: for which the norm is computed. residual: as for the norm."""
        self._norm = norm
        self._linear = linear
        self._hidden = hidden
        self._residual = residual
        self._totals: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[TensorOrQuantized]:
        begin, residual = 0, None
        for chunk in self._hidden.chunks:
            end = begin + chunk.addend.shape[0]
            if self._residual is not None:
                residual = self._residual[begin:end]
            normed, total = self._norm.quantized_for(self._linear, chunk, residual)
            self._totals.append(total)
            yield normed
            begin = end

    def residual(self) -> torch.Tensor:
        """The next residual, once all chunks have been computed."""
        old, begin = self._residual, 0
        if old is not None:
            for total in self._totals:  # a fused norm overwrites the residual
                if total.data_ptr() != old[begin:].data_ptr():
                    break
                begin += total.shape[0]
            else:
                return old
        return torch.cat(self._totals)


def apply_normed(
    norm: Norm | ResidualAddition,
    linear: Linear,
    inner: Callable[[TensorOrQuantized], TensorOrQuantized],
    output: OutputProjection,
    hidden: torch.Tensor | PartialSum,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
    """output(inner(norm(hidden + residual))), by chunks of rows if `hidden` is split, and hidden + residual.

    linear: the first layer of `inner`, which the norm is quantized for.
    """
    if isinstance(hidden, SplitSum) and isinstance(output, SplitOutput):
        chunks = normed_chunks(norm, linear, hidden, residual)
        return output.by_chunk(inner(normed) for normed in chunks), chunks.residual()
    normed, residual = norm.quantized_for(linear, hidden, residual)
    return output(inner(normed)), residual


class AttentionBlock:
    """Input norm, projections to queries, keys and values, attention, output projection."""

    def __init__(
        self,
        norm: Norm | ResidualAddition,
        qkv: Linear,
        attention: Attention | GroupedAttention,
        output: OutputProjection,
    ) -> None:
        self._norm = norm
        self._qkv = qkv
        self._attention = attention
        self._output = output

    def __call__(
        self,
        run: ForwardPass,
        hidden: torch.Tensor | PartialSum,
        residual: torch.Tensor | None,
        angles: Angles | None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """Attention of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros. angles: None: queries and keys are not rotated.
        """
        if isinstance(hidden, SplitSum):
            chunks = normed_chunks(self._norm, self._qkv, hidden, residual)
            qkv = torch.cat([self._qkv(normed) for normed in chunks])
            residual = chunks.residual()
        else:
            normed, residual = self._norm.quantized_for(self._qkv, hidden, residual)
            qkv = self._qkv(normed)
        return self._output(self._attention(run, qkv, angles)), residual


class GatedMLP:
    """Input norm, gate and up projections, activation, down projection."""

    def __init__(self, norm: Norm | ResidualAddition, gate_up: Linear, down: OutputProjection) -> None:
        self._norm = norm
        self._gate_up = gate_up
        self._down = down

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """The MLP of norm(hidden + residual), and hidden + residual, the next residual: both [tokens, hidden_size].

        residual: may be overwritten; None counts as zeros.
        """
        return apply_normed(self._norm, self._gate_up, self._gated, self._down, hidden, residual)

    def _gated(self, normed: TensorOrQuantized) -> TensorOrQuantized:
        return self._gate_up.gated_quantized_for(self._down.linear, normed)


class MLP:
    """Input norm, up projection, activation, down projection."""

    def __init__(
        self,
        norm: Norm | ResidualAddition,
        up: Linear,
        activate: Callable[[torch.Tensor], torch.Tensor],
        down: OutputProjection,
    ) -> None:
        self._norm = norm
        self._up = up
        self._activate = activate
        self._down = down

    def __call__(
        self, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """As GatedMLP."""
        return apply_normed(self._norm, self._up, self._activated, self._down, hidden, residual)

    def _activated(self, normed: TensorOrQuantized) -> torch.Tensor:
        return self._activate(self._up(normed))
