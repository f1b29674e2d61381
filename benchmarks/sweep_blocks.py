"""Decoder blocks of near_sweep.py: quantized linear layers at few rows, in sequence, by the rules or by a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from quant_chain import Chain
from sweep_linears import few_row_tiles
from sweep_near import BlockCase
from sweep_timing import SweepTimer, runs

from engine.core.compilation import CompilingElsewhere
from engine.ops.common.launch import num_sms
from engine.ops.gemm.few_rows_tile import FewRowsTile, even_splits, supports_few_rows
from engine.ops.gemm.weight_only_tiles import GemmTile, WeightOnlyShape, WeightOnlyTile

COLD_BYTES = 160e6
"""Bytes of weights that are read before any are read again: three L2 caches of an H200."""
FEW_ROWS_TILES = {
    8: (
        FewRowsTile(rows=16, warps=2, ahead=2, x_ahead=2, programs=8),
        FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4),
        FewRowsTile(rows=16, warps=4, ahead=3, x_ahead=2, programs=4),
        FewRowsTile(rows=16, warps=8, ahead=2, x_ahead=4, programs=2),
        FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3),
        FewRowsTile(rows=32, warps=4, ahead=2, x_ahead=2, programs=4, row_warps=2),
        FewRowsTile(rows=32, warps=4, ahead=3, x_ahead=2, programs=4, row_warps=2),
        FewRowsTile(rows=64, warps=4, ahead=2, x_ahead=2, programs=4, row_warps=4),
    ),
    4: (
        FewRowsTile(rows=64, warps=4, ahead=1, x_ahead=2, programs=4, row_warps=2),
        FewRowsTile(rows=32, warps=2, ahead=1, x_ahead=2, programs=8),
        FewRowsTile(rows=32, warps=4, ahead=1, x_ahead=4, programs=3),
        FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=4, programs=2),
        FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3),
        FewRowsTile(rows=16, warps=4, ahead=4, x_ahead=0, programs=3),
        FewRowsTile(rows=16, warps=4, ahead=3, x_ahead=2, programs=3),
        FewRowsTile(rows=32, warps=8, ahead=1, x_ahead=4, programs=2, row_warps=2),
        FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4),
        FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=3),
        FewRowsTile(rows=16, warps=2, ahead=2, x_ahead=2, programs=8),
        FewRowsTile(rows=32, warps=4, ahead=2, x_ahead=2, programs=3, row_warps=2),
    ),
}
"""Bits of a weight -> the tiles of few_rows_tile.py, without splits."""
SPLITS = (2, 3, 4)
"""Numbers of splits to try, with tiles of 16 rows of 8-bit weights."""
MIN_BLOCKS_PER_SPLIT = 4
MAX_PROGRAMS_PER_SM = 16
"""Splits that make more programs than this are left out."""
MIN_GAIN = 0.003
"""Share of a block's time that another tile of a layer must save."""

Chosen = Mapping[str, GemmTile]


class Block:
    """A decoder block, by its rules until `search`."""

    def __init__(self, case: BlockCase, device: torch.device, dtype: str, timer: SweepTimer) -> None:
        self.case = case
        self._timer = timer
        shapes = {role: shape.sizes for role, shape in case.linears.items()}
        self.dtype = getattr(torch, dtype)
        cold_bytes = COLD_BYTES if device.type == "cuda" else 0
        self.chain = Chain(shapes, case.kind, device, dtype=self.dtype, cold_bytes=cold_bytes, blocks=2)
        self.rule: Chosen = {role: self.chain.default(role, case.rows) for role in shapes}
        self.chosen = self.rule
        x = torch.randn(2, case.rows, case.hidden, device=device).to(self.dtype)
        self._x, self._residual = x[0], x[1]

    def tiles(self, role: str) -> list[GemmTile]:
        """Tiles to try for a layer, that of the rule first."""
        shape, rows = self.chain.gemm_shape(role), self.case.rows
        sms = num_sms(self.chain.device)
        found: list[GemmTile] = [self.rule[role]]
        if supports_few_rows(shape, rows):
            for tile in FEW_ROWS_TILES[shape.layout.bits]:
                found += [tile, *_with_splits(tile, shape, sms)]
        others = few_row_tiles(shape, rows, self.chain.device)
        return list(dict.fromkeys([*found, *(tile for tile in others if tile is not None)]))

    def compile(self) -> None:
        """Begin to compile all tiles in other processes."""
        with CompilingElsewhere():
            for role, shape in self.case.linears.items():
                x = torch.empty(self.case.rows, shape.inputs, dtype=self.dtype, device=self.chain.device)
                for tile in self.tiles(role):
                    self.chain.compile_tile(role, tile, x)

    def seconds(self, chosen: Chosen | None = None) -> float:
        """Seconds of one block, by the tiles given, else by those chosen at present."""
        tiles = chosen or self.chosen
        run = self._timer.replayed(lambda: self.chain.run(self._x, self._residual.clone(), tiles))
        return run / len(self.chain.blocks)

    def search(self) -> str:
        """Choose the tiles of one layer after the other, each by the time of the whole block; return them as text.

        The search runs twice, from the tiles of the rule and from tiles of the tensor-core kernel alone, since a
        mixture of kernels may be slower than either.
        """
        alone = {role: tile for role in self.rule if (tile := self._tensor_core_tile(role)) is not None}
        starts = [self.rule, alone] if len(alone) == len(self.rule) and alone != self.rule else [self.rule]
        found = [self._search_from(start) for start in starts]
        self.chosen, seconds = min(found, key=lambda pair: pair[1])
        changed = [f"{role} {tile}" for role, tile in self.chosen.items() if tile != self.rule[role]]
        return f"{seconds * 1e6:.2f} us by {'; '.join(changed) or 'the tiles of the rule'}"

    def _tensor_core_tile(self, role: str) -> GemmTile | None:
        """A tile of the tensor-core kernel; None if there is none to try."""
        return next((tile for tile in reversed(self.tiles(role)) if isinstance(tile, WeightOnlyTile)), None)

    def _search_from(self, chosen: Chosen) -> tuple[Chosen, float]:
        best, least = dict(chosen), min(self.seconds(chosen) for _ in range(2))
        for role in self.rule:
            times: dict[GemmTile, float] = {}
            for tile in self.tiles(role):
                x = torch.zeros(self.case.rows, self.chain.shapes[role][1], dtype=self.dtype, device=self._x.device)
                if tile != best[role] and runs(lambda tile=tile, x=x, role=role: self.chain.multiply(role, tile, x)):
                    times[tile] = self.seconds({**best, role: tile})
            for tile in sorted(times, key=lambda one: times[one])[:2]:
                again = min(times[tile], self.seconds({**best, role: tile}))
                if again < least * (1 - MIN_GAIN):
                    best, least = {**best, role: tile}, again
        return best, least


def _with_splits(tile: FewRowsTile, shape: WeightOnlyShape, sms: int) -> Sequence[FewRowsTile]:
    """The tile with each of SPLITS that leaves no split short or empty."""
    if shape.layout.bits != 8 or tile.rows > 16:
        return ()
    programs = -(-shape.weight_rows // tile.rows)
    return [
        evolve(tile, splits=splits)
        for splits in SPLITS
        if even_splits(splits, shape.blocks) == splits
        and shape.blocks >= splits * MIN_BLOCKS_PER_SPLIT
        and programs * splits <= MAX_PROGRAMS_PER_SM * sms
    ]
