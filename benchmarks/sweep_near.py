"""Near neighbours of the cases of near_sweep.py: shapes of round sizes, just below and just above a random one.

Nothing here needs a GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from itertools import cycle, islice

from attrs import evolve, frozen
from sweep_cases import GROUP, AttentionCase, Heads, Limits, LinearCase, LinearShape

STEPS = 8
"""Round sizes are multiples of this part of the power of two below them: 4096, 4608, 5120, ..., 8192, 9216, ..."""
UNIT = 16
"""Sizes of linear layers are multiples of this."""
KV_HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Round numbers of KV heads."""
MAX_BLOCK_ROWS = 8
"""Up to this many rows, quantized layers are measured as the decoder block that they belong to."""


def step(size: int, unit: int = 1) -> int:
    """Distance of the round sizes from the power of two below `size` on."""
    return max((1 << (size.bit_length() - 1)) // STEPS, unit)


def round_down(size: int, unit: int = 1) -> int:
    """The largest round size that is at most `size`."""
    return max(size // step(size, unit) * step(size, unit), unit)


def round_up(size: int, unit: int = 1) -> int:
    """The smallest round size that is at least `size`."""
    return -(-size // step(size, unit)) * step(size, unit)


def nearest(size: int, unit: int = 1) -> int:
    """The round size nearest to `size`."""
    return min(round_down(size, unit), round_up(size, unit), key=lambda one: abs(one - size))


def below(size: int, unit: int = 1) -> int:
    """The round size before a round one."""
    return max(round_down(size - 1, unit), unit)


def above(size: int, unit: int = 1) -> int:
    """The round size after a round one."""
    return size + step(size, unit)


@frozen(kw_only=True)
class BlockCase:
    """The four linear layers of a decoder block and its norms, at few rows."""

    drawn: str
    """Name of the case that was drawn: one of the layers."""
    kind: str
    rows: int
    hidden: int
    intermediate: int
    width: int
    """Inputs of the output projection: of all query heads."""
    merged: int
    """Outputs for queries, keys and values."""

    @classmethod
    def of(cls, case: LinearCase) -> BlockCase:
        """The block that a drawn layer belongs to. In 4 bits all inputs are rounded to whole groups."""
        assert case.model is not None, "a drawn case has a model"
        model, unit = case.model, GROUP if case.kind == "4bit" else UNIT
        heads = model.attention
        sizes = model.hidden, model.intermediate, heads.heads * heads.head_dim
        hidden, intermediate, width = (-(-size // unit) * unit for size in sizes)
        merged = width + 2 * heads.kv_heads * heads.head_dim
        return cls(
            drawn=case.name,
            kind=case.kind,
            rows=case.rows,
            hidden=hidden,
            intermediate=intermediate,
            width=width,
            merged=merged,
        )

    @property
    def name(self) -> str:
        """Of a line of the table."""
        return f"{self.drawn}, in its block"

    @property
    def near_name(self) -> str:
        """As a neighbour."""
        return f"block {self.merged}x{self.hidden}, {self.hidden}x{self.width}, MLP {self.intermediate}"

    @property
    def linears(self) -> Mapping[str, LinearShape]:
        """The linear layers by role."""
        return {
            "qkv": LinearShape(outputs=self.merged, inputs=self.hidden),
            "output": LinearShape(outputs=self.hidden, inputs=self.width),
            "gate_up": LinearShape(outputs=2 * self.intermediate, inputs=self.hidden, gated=True),
            "down": LinearShape(outputs=self.hidden, inputs=self.intermediate),
        }

    def floor(self, limits: Limits) -> float:
        """Sum of the floors of the layers."""
        layers = (LinearCase(kind=self.kind, shape=shape, rows=self.rows) for shape in self.linears.values())
        return sum(layer.floor(limits) for layer in layers)


NearCase = LinearCase | AttentionCase | BlockCase


def measured_case(case: LinearCase | AttentionCase) -> NearCase:
    """What is measured for a drawn case: quantized layers of few rows as their block."""
    if isinstance(case, AttentionCase) or case.kind == "bf16" or case.rows > MAX_BLOCK_ROWS:
        return case
    return BlockCase.of(case)


def near_neighbours(case: NearCase) -> tuple[NearCase, NearCase]:
    """The cases of the next smaller and the next larger round sizes.

    Sizes that are round stay as they are. Where all of them are, one is replaced by the round sizes before and after
    it: the outputs of a layer, the intermediate size of a block, the contexts of attention (by an eighth).
    """
    if isinstance(case, LinearCase):
        return _near_layers(case)
    if isinstance(case, BlockCase):
        return _near_blocks(case)
    shape, count = case.shape, len(case.lengths)
    group = shape.heads // shape.kv_heads
    low_heads = KV_HEADS[bisect_right(KV_HEADS, shape.kv_heads) - 1]
    high_heads = KV_HEADS[min(bisect_left(KV_HEADS, shape.kv_heads), len(KV_HEADS) - 1)]
    low = _attention(case, low_heads, group, round_down(count))
    high = _attention(case, high_heads, group, round_up(count))
    if low == high:
        shorter, longer = (
            tuple(max(length * part // STEPS, 1) for length in case.lengths) for part in (STEPS - 1, STEPS + 1)
        )
        return evolve(case, lengths=shorter), evolve(case, lengths=longer)
    return low, high


def round_case(case: NearCase) -> NearCase:
    """The case with the nearest round sizes."""
    if isinstance(case, LinearCase):
        unit = _unit(case.kind)
        outputs, inputs = nearest(case.shape.outputs, UNIT), nearest(case.shape.inputs, unit)
        return evolve(case, shape=evolve(case.shape, outputs=outputs, inputs=inputs))
    if isinstance(case, BlockCase):
        return _rounded_block(case, nearest)
    group = case.shape.heads // case.shape.kv_heads
    kv_heads = min(KV_HEADS, key=lambda one: abs(one - case.shape.kv_heads))
    return _attention(case, kv_heads, group, nearest(len(case.lengths)))


def _unit(kind: str) -> int:
    """Multiple that the inputs of a layer are."""
    return GROUP if kind == "4bit" else UNIT


def _near_layers(case: LinearCase) -> tuple[LinearCase, LinearCase]:
    (outputs, inputs), unit = case.shape.sizes, _unit(case.kind)
    low = round_down(outputs, UNIT), round_down(inputs, unit)
    high = round_up(outputs, UNIT), round_up(inputs, unit)
    if low == high:
        low, high = (below(outputs, UNIT), inputs), (above(outputs, UNIT), inputs)
    shapes = (evolve(case.shape, outputs=rows, inputs=columns) for rows, columns in (low, high))
    smaller, larger = (evolve(case, shape=shape) for shape in shapes)
    return smaller, larger


def _near_blocks(case: BlockCase) -> tuple[BlockCase, BlockCase]:
    low, high = _rounded_block(case, round_down), _rounded_block(case, round_up)
    if low == high:
        size, unit = case.intermediate, _unit(case.kind)
        return evolve(case, intermediate=below(size, unit)), evolve(case, intermediate=above(size, unit))
    return low, high


def _rounded_block(case: BlockCase, rounded: Callable[[int, int], int]) -> BlockCase:
    """The block with all sizes rounded. rounded: size, unit -> round size."""
    unit = _unit(case.kind)
    return evolve(
        case,
        hidden=rounded(case.hidden, unit),
        intermediate=rounded(case.intermediate, unit),
        width=rounded(case.width, unit),
        merged=rounded(case.merged, UNIT),
    )


def _attention(case: AttentionCase, kv_heads: int, group: int, count: int) -> AttentionCase:
    """The same attention with other numbers of KV heads and of sequences."""
    shape = Heads(heads=kv_heads * group, kv_heads=kv_heads, head_dim=case.shape.head_dim)
    return evolve(case, shape=shape, lengths=tuple(islice(cycle(case.lengths), count)))
