"""Tiles of the kernels for few rows of x, w4a16_few_rows.py and w8a16_few_rows.py, and the rules that choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from engine.ops.gemm.packed_layout import SPANS

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_tiles import WeightOnlyShape

MAX_FEW_ROWS = 8
"""Rows of x, at most."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""
TILE_ROWS = 16
"""Rows of W of the smallest tile."""
MIN_SIDE = 1024
"""4 bits: up to this many rows of W or inputs, and SMALL_BYTES of weights, other kernels are faster at one row."""
SMALL_BYTES = 2**23
W8_MIN_SIDE = 4096
"""8 bits: with fewer rows of W or inputs other kernels are used. A block of Qwen3-1.7B in a chain of linear layers was
4 % slower at one row; others were not measured."""
W8_MAX_TILES = 4
"""8 bits: most TILE_ROWS per multiprocessor, unless gated: more were not measured."""
LONG_INPUTS = 24
"""With more blocks of 256 inputs than this, eight warps divide them."""


@frozen(kw_only=True)
class FewRowsTile:
    """A tile of the kernels for up to MAX_FEW_ROWS rows of x, for GPUs with wgmma: it was not measured on others."""

    rows: int
    """Rows of W: a multiple of 16."""
    warps: int
    """Warps, which divide the inputs, unless `row_warps`."""
    ahead: int
    """Blocks of each warp that are loaded before the first is multiplied."""
    x_ahead: int
    """Fields of x that are loaded ahead of those being multiplied: 2 or 4, or 0 for a block at a time, when needed.
    Of 8-bit weights at most those of `ahead` blocks."""
    programs: int
    """Programs per multiprocessor, for which there are registers."""
    row_warps: int = 1
    """Warps that divide the rows of W, and read the same x; the others divide the inputs."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of W, {self.warps} warps, {self.ahead} blocks and {self.x_ahead} fields of x ahead,"
            f" {self.programs} programs, {self.row_warps} row warps"
        )

    @property
    def registers(self) -> int:
        """Maximum registers per thread."""
        return min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MAX_REGISTERS)

    def grid(self, weight_rows: int, rows: int) -> tuple[int]:
        """Launch grid for this number of rows of W."""
        assert rows <= MAX_FEW_ROWS, f"{rows} rows of x; at most {MAX_FEW_ROWS}"
        return (-(-weight_rows // self.rows),)


def suits_few_rows(shape: WeightOnlyShape, rows: int, sms: int) -> bool:
    """Whether a kernel for few rows has the layout of the weights, and is the fastest."""
    layout = shape.layout
    # Rows of x and of the result start at multiples of 16 bytes.
    if rows > MAX_FEW_ROWS or shape.inputs % 8 or shape.outputs % 8:
        return False
    side = min(shape.weight_rows, shape.inputs)
    if layout.scale_layout == "outputs":
        return side >= W8_MIN_SIDE and (shape.gated or shape.weight_rows <= W8_MAX_TILES * TILE_ROWS * sms)
    has_layout = layout.scale_layout == "groups" and layout.bits == 4 and layout.span == SPANS[0]
    return has_layout and not (rows == 1 and side <= MIN_SIDE and shape.weight_bytes <= SMALL_BYTES)


def _w8_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """As `few_rows_tile`, for 8-bit weights."""
    tiles = -(-shape.weight_rows // TILE_ROWS)
    if tiles > 16 * sms:
        return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4)
    if tiles > 8 * sms:
        return FewRowsTile(rows=64, warps=4, ahead=2, x_ahead=2, programs=4, row_warps=4)
    if tiles > W8_MAX_TILES * sms:
        return FewRowsTile(rows=32, warps=4, ahead=2, x_ahead=2, programs=4, row_warps=2)
    if tiles <= 2 * sms:
        return FewRowsTile(rows=16, warps=8, ahead=2, x_ahead=4, programs=2)
    if shape.blocks > 2 * LONG_INPUTS and tiles <= 3 * sms:
        return FewRowsTile(rows=16, warps=8, ahead=1, x_ahead=2, programs=3)
    return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4)


def few_rows_tile(shape: WeightOnlyShape, sms: int) -> FewRowsTile:
    """The tile for a shape that `suits_few_rows`, on a GPU with this many multiprocessors.

    All programs run at the same time where possible, with as many loads in progress as registers allow. These were the
    fastest, or nearly, in chains of the linear layers of decoder blocks on an H200 (as for
    weight_only_tiles.UNMEASURED_MAX_ROWS), and in whole steps of Llama-3.1-8B.
    """
    if shape.layout.bits == 8:
        return _w8_tile(shape, sms)
    tiles = -(-shape.weight_rows // TILE_ROWS)
    share = -(-shape.blocks // 4)
    if shape.gated and 8 * sms < tiles <= 16 * sms:
        return FewRowsTile(rows=64, warps=4, ahead=1, x_ahead=2, programs=4, row_warps=2)
    if shape.gated and tiles <= 8 * sms:
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
    if tiles <= 3 * sms:
        return FewRowsTile(rows=32, warps=8, ahead=1, x_ahead=4, programs=2, row_warps=2)
    return FewRowsTile(rows=16, warps=4, ahead=2, x_ahead=2, programs=4)
