"""Launches of the kernels for the experts of few tokens (few_tokens.py), and their tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from engine.ops.activation.act_and_mul import ACTIVATIONS
from engine.ops.common.launch import dependent_launch
from engine.ops.experts import few_tokens
from engine.ops.experts.few_tokens_weights import KINDS
from engine.ops.experts.weights import BLOCK, StackedWeight, WeightFormat
from engine.ops.gemm.few_rows import COLUMNS

if TYPE_CHECKING:
    from engine.ops.experts.tiles import ExpertsShape

MAX_TOKENS = COLUMNS.value
"""Maximum number of tokens that the kernels can compute."""
MAX_TOKENS_OF_4_BITS = 1
"""Maximum number of tokens for which these kernels are the fastest with 4-bit weights."""
MAX_TOKENS_OF_CHANNELS = 2
"""The same with float8 weights that have a scale per output."""
GROUP_OF_INT4 = 128
"""Inputs per group of int4 weights: no others have run on a GPU."""
SCALE_ROWS = 128
"""Rows per block of float8 weights with scales of blocks: no others have run on a GPU."""
MIN_LARGE = 4
"""Minimum programs per multiprocessor for tiles of 32 rows, of 4-bit gate and up."""
MANY_PAIRS = 16
"""With more pairs of a token and an expert, programs of the float8 down projection have 16 warps instead of 8."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers of a thread."""


@frozen(kw_only=True)
class FewTokensTile:
    """The rows of W that a program multiplies, and how."""

    rows: int
    """Rows of W, a multiple of 16; for gate and up half of them each."""
    warps: int
    """Warps per program."""
    ahead: int
    """Blocks that each warp loads before it multiplies the first."""
    programs: int
    """Programs per multiprocessor for which there are registers."""
    k_warps: int = 1
    """Of the down projection: warps that divide the inputs of one expert. Groups of that many warps divide the
    experts."""

    @property
    def registers(self) -> int:
        """Maximum registers per thread."""
        return min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MAX_REGISTERS)


@frozen(kw_only=True)
class FewTokensTiles:
    """The tiles of both kernels."""

    gate_up: FewTokensTile
    down: FewTokensTile


def kind_of(form: WeightFormat) -> str | None:
    """The name in KINDS of a format of weights; None if the kernels cannot read the format."""
    if form.kind in ("channel", "block"):
        return "float8" if form.dtype == "float8_e4m3fn" else None
    return form.kind


def suits_few_tokens(shape: ExpertsShape, tokens: int) -> bool:
    """Whether the kernels can compute this many tokens of a shape on its GPU, and are the fastest that can.

    Only what has run on a GPU is accepted: activations in bfloat16, all experts on one rank, and at least one pair of
    a token and an expert per group of warps of the down projection.
    """
    form, kind = shape.format, kind_of(shape.format)
    if not shape.wgmma or kind is None or shape.dtype != "bfloat16" or shape.rank_experts != shape.num_experts:
        return False
    if (form.kind == "int4" and form.group != GROUP_OF_INT4) or (
        form.kind == "block" and form.scale_rows != SCALE_ROWS
    ):
        return False
    unit = 16 if kind == "float8" else 8  # rows of W and of x start at multiples of 16 bytes
    if shape.hidden % unit or shape.intermediate % unit:
        return False
    most = MAX_TOKENS
    if form.is_4bit:
        most = MAX_TOKENS_OF_4_BITS
    elif form.kind == "channel":
        most = MAX_TOKENS_OF_CHANNELS
    down = few_tokens_tiles(shape, tokens, 1).down
    return 1 <= tokens <= most and tokens * shape.top_k >= down.warps // down.k_warps


def few_tokens_tiles(shape: ExpertsShape, tokens: int, sms: int) -> FewTokensTiles:
    """The tiles of both kernels, for a shape and number of tokens that `suits_few_tokens` accepts.

    sms: multiprocessors of the GPU. Chosen by times of the experts of Qwen3-30B-A3B and gpt-oss-20b on an H200.
    """
    pairs = tokens * shape.top_k
    if shape.format.is_4bit:
        is_large = 2 * shape.intermediate // 32 * pairs >= MIN_LARGE * sms
        large = FewTokensTile(rows=32, warps=2, ahead=1, programs=6)
        return FewTokensTiles(
            gate_up=large if is_large else FewTokensTile(rows=16, warps=2, ahead=2, programs=7),
            down=FewTokensTile(rows=16, warps=8, ahead=2, programs=2, k_warps=2),
        )
    of_eight = FewTokensTile(rows=16, warps=8, ahead=4, programs=1)
    if shape.format.kind == "plain":
        return FewTokensTiles(gate_up=FewTokensTile(rows=16, warps=4, ahead=4, programs=4), down=of_eight)
    many = FewTokensTile(rows=16, warps=16, ahead=2, programs=1)
    return FewTokensTiles(
        gate_up=FewTokensTile(rows=16, warps=4, ahead=1, programs=6), down=many if pairs > MANY_PAIRS else of_eight
    )


def experts_of_few_tokens(
    x: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    activation: str,
    tiles: FewTokensTiles,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, times their factors: [tokens, hidden], in x's dtype.

    x: [tokens, hidden] bfloat16, contiguous, with at most MAX_TOKENS tokens. experts: [tokens, top_k] int32; -1 adds
    nothing. factors: [tokens, top_k] float32. gate_up: [experts, 2 * intermediate, hidden], gates first; down:
    [experts, hidden, intermediate]. gate_up_bias: [experts, 2 * intermediate]; down_bias:
    [experts, hidden]. activation: one of ACTIVATIONS.
    """
    top_k = experts.shape[1]
    hidden = x.new_empty((len(x) * top_k, gate_up.outputs // 2))
    out = x.new_empty((len(x), down.outputs))
    grid = -(-gate_up.outputs // tiles.gate_up.rows), len(hidden)
    few_tokens.experts_gate_up_kernel[grid](
        hidden,
        x.view(torch.int32),
        *_operands(gate_up, gate_up_bias, out),
        experts,
        len(x),
        hidden.shape[1],
        *_sizes(gate_up, x),
        ACTIVATION=ACTIVATIONS[activation].value,
        **_constants(gate_up, gate_up_bias, tiles.gate_up, experts),
    )
    few_tokens.experts_down_kernel[(-(-down.outputs // tiles.down.rows),)](
        out,
        hidden.view(torch.int32),
        *_operands(down, down_bias, out),
        experts,
        factors,
        len(x),
        down.outputs,
        *_sizes(down, hidden),
        K_WARPS=tiles.down.k_warps,
        **_constants(down, down_bias, tiles.down, experts),
    )
    return out


def _operands(weight: StackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """values, scales, factors and bias. One that does not exist is replaced by another tensor, which is not read."""
    values = weight.values.view(torch.int32)
    scales = values if weight.scales is None else weight.scales
    factors = scales if weight.factors is None else weight.factors
    return values, scales, factors, out if bias is None else bias


def _sizes(weight: StackedWeight, x: torch.Tensor) -> tuple[int, int, int]:
    """The kernels' arguments inputs, row_words and blocks."""
    inputs = x.shape[1]
    if weight.format.is_4bit:
        return inputs, 0, weight.values.shape[1]
    return inputs, inputs * weight.values.element_size() // 4, -(-inputs // BLOCK)


def _constants(
    weight: StackedWeight, bias: torch.Tensor | None, tile: FewTokensTile, experts: torch.Tensor
) -> dict[str, int | bool]:
    kind = kind_of(weight.format)
    assert kind is not None
    return {
        "TOP_K": experts.shape[1],
        "KIND": KINDS[kind].value,
        "SCALE_ROWS": weight.format.scale_rows if weight.format.kind == "block" else 0,
        "BIAS": bias is not None,
        "ONE": len(experts) == 1,
        "TILE": tile.rows,
        "AHEAD": tile.ahead,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
        **dependent_launch(experts.device),
    }
