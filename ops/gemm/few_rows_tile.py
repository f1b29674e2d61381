"""Tiles of the W4A16 kernel for few rows of x, w4a16_few_rows.matmul_kernel, and the rule that chooses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_tiles import WeightOnlyShape

MAX_FEW_ROWS = 8
"""Rows of x, at most."""
MAX_CHOSEN_ROWS = 4
"""Rows of x up to which the kernel is chosen. With more it is slower in whole decode steps, though not in chains of
linear layers alone."""

REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""
TILE_ROWS = 16
"""Rows of W of the smallest tile."""
MIN_SIDE = 1024
"""Up to this many rows of W or inputs, and SMALL_BYTES of weights, other kernels are faster at one row."""
SMALL_BYTES = 2**23
LONG_INPUTS = 24
"""With more blocks of inputs than this, eight warps divide them."""


@frozen(kw_only=True)
class FewRowsTile:
    """A tile of the kernel for up to MAX_FEW_ROWS rows of x, for GPUs with wgmma: it was not measured on others."""

    rows: int
    """Rows of W: a multiple of 16."""
    warps: int
    """Warps, which divide the inputs."""
    ahead: int
    """Blocks of each warp that are loaded before the first is multiplied."""
    x_ahead: int
    """Fields of x that are loaded ahead of those being multiplied: 2 or 4, or 0 for a block at a time, when needed."""
    programs: int
    """Programs per multiprocessor, for which there are registers."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of W, {self.warps} warps, {self.ahead} blocks and {self.x_ahead} fields of x ahead,"
            f" {self.programs} programs"
        )

    @property
    def registers(self) -> int:
        """Maximum registers per thread."""
        return min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MAX_REGISTERS)

    def grid(self, weight_rows: int, rows: int) -> tuple[int]:
        """Launch grid for this number of rows of W."""
        assert rows <= MAX_FEW_ROWS, f"{rows} rows of x; at most {MAX_FEW_ROWS}"
        return (-(-weight_rows // self.rows),)


def suits_few_rows(shape: WeightOnlyShape, rows: int) -> bool:
    """Whether the kernel is the fastest for a shape that PersistentTile supports."""
    is_small = min(shape.weight_rows, shape.inputs) <= MIN_SIDE and shape.weight_bytes <= SMALL_BYTES
    return rows <= MAX_CHOSEN_ROWS and not (rows == 1 and is_small)


def few_rows_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """The tile for a shape that PersistentTile supports, on a GPU with this many multiprocessors.

    All programs run at the same time where possible, with as many loads in progress as registers allow. These were the
    fastest in chains of the linear layers of decoder blocks on an H200, as for weight_only_tiles.UNMEASURED_MAX_ROWS.
    """
    tiles = -(-shape.weight_rows // TILE_ROWS)
    share = -(-shape.blocks // 4)
    if shape.gated and tiles <= 16 * sms:
        return FewRowsTile(rows=32, warps=2, ahead=1, x_ahead=2, programs=8)
    if shape.gated or tiles > 4 * sms or share == 1:
        return FewRowsTile(rows=32, warps=4, ahead=1, x_ahead=4, programs=3)
    if tiles <= sms or (shape.blocks > LONG_INPUTS and tiles <= 2 * sms):
        return FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=4, programs=2)
    if shape.blocks > LONG_INPUTS and tiles <= 3 * sms:
        return FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3)
    # Four warps have `share` blocks each: more ahead, unless the last loop iteration would have fewer.
    if tiles <= 2 * sms and share % 4 == 0:
        return FewRowsTile(rows=16, warps=4, ahead=4, x_ahead=0, programs=3)
    if tiles <= 3 * sms and -(-share // 3) * 3 <= -(-share // 2) * 2:
        return FewRowsTile(rows=16, warps=4, ahead=3, x_ahead=2, programs=3)
    return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4)
