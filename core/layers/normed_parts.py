"""Norms of which each rank computes its own rows, and sends them to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from engine.core.distributed.scattered_rows import ScatteredRows
from engine.core.quant.base import FusedInputQuantization, QuantizedActivation

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.distributed.scattered_sum import ScatteredSum
    from engine.core.layers.linear import Linear, TensorOrQuantized
    from engine.core.layers.norm import Norm, ResidualAddition


class NormedParts:
    """The norms of a sum's chunks, of which each rank computes its own rows. The constructor launches all of them.

    An iteration yields the norm of each chunk with the rows of all ranks, for which the current stream waits then: a
    tensor, or a quantized activation, in memory that a later sum overwrites.
    """

    def __init__(
        self,
        norm: Norm | ResidualAddition,
        linear: Linear | None,
        chunks: Sequence[ScatteredSum],
        residual: torch.Tensor | None,
        group: RankGroup,
    ) -> None:
        """linear: for which the norms are computed; None: for any use."""
        self._made: list[tuple[ScatteredSum, FusedInputQuantization | None]] = []
        sizes, totals = [len(chunk.addend) for chunk in chunks], []
        # Gathered rows may have been written to, as by residual.add_(x).
        if isinstance(residual, ScatteredRows) and (residual.is_gathered or residual.chunks != tuple(sizes)):
            residual = residual.whole()
        begin = 0
        for number, chunk in enumerate(chunks):
            own = None
            if isinstance(residual, ScatteredRows):
                own = residual.parts[number]
            elif residual is not None:  # which the norm must not overwrite before it has been read
                own = residual[begin + chunk.begin : begin + chunk.end]
                chunk.order_norm_behind_current_stream()
            begin += sizes[number]
            fused = None
            with chunk.norm_stream():
                rows = chunk.receive()
                made, total = norm(rows, own) if linear is None else norm.quantized_for(linear, rows, own)
                tensors: Sequence[torch.Tensor]
                if isinstance(made, QuantizedActivation):
                    assert linear is not None
                    fused = linear.fused_input_quantization(chunk.addend)
                    assert fused is not None
                    tensors = fused.row_tensors(made)
                else:
                    tensors = [made]
                chunk.gather(tensors)
            totals.append(total)
            self._made.append((chunk, fused))
        self._residual = ScatteredRows(totals, sizes, group).as_tensor()

    def __iter__(self) -> Iterator[TensorOrQuantized]:
        for chunk, fused in self._made:
            tensors = chunk.finish()
            yield tensors[0] if fused is None else fused.from_row_tensors(tensors)

    def residual(self) -> torch.Tensor:
        """The next residual: ScatteredRows."""
        return self._residual
