"""The experts of a layer on a GPU: sort of the pairs, two grouped GEMMs with the activation between, weighted sum.

Few tokens are computed by other kernels: those of few_tokens.py, or where these are not used, of one_token.py.
"""

from __future__ import annotations

import torch
from attrs import frozen

from engine.ops.experts.combine import combine
from engine.ops.experts.dequantize import dequantize
from engine.ops.experts.few_tokens_launch import FewTokensTiles, experts_of_few_tokens
from engine.ops.experts.grouped_matmul import GroupedTile, grouped_matmul
from engine.ops.experts.one_token import KINDS_OF_ONE_TOKEN, experts_of_one_token
from engine.ops.experts.quantize import quantize_activations
from engine.ops.experts.sort import PairSorter
from engine.ops.experts.weights import StackedWeight, WeightFormat


@frozen(kw_only=True)
class ExpertsTile:
    """The tiles of both grouped GEMMs."""

    rows: int
    """Rows of x per tile of either GEMM."""
    gate_up: GroupedTile
    down: GroupedTile
    dequantized: bool = False
    """Whether 4-bit weights are dequantized to 16 bits before they are multiplied."""

    def __str__(self) -> str:
        dequantized = "dequantized, " if self.dequantized else ""
        return f"{dequantized}{self.rows} rows, gate and up {self.gate_up}; down {self.down}"


@frozen(kw_only=True, eq=False)
class ExpertsWeights:
    """The weights of a layer's experts."""

    gate_up: StackedWeight
    """[experts, 2 * intermediate, hidden], gates first."""
    down: StackedWeight
    """[experts, hidden, intermediate]."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * intermediate]."""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]."""


def experts_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertsWeights,
    activation: str,
    tile: ExpertsTile,
    sorter: PairSorter,
    *,
    quantized: torch.dtype | None = None,
    few_tokens: FewTokensTiles | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """The sum of each token's experts, times their factors: [tokens, hidden], in x's dtype.

    x: [tokens, hidden], contiguous; experts, factors: [tokens, top_k]; an expert of -1 counts for nothing. quantized:
    the dtype to which activations are quantized, that of the weights, with scales per row or per block as the weights.
    few_tokens: tiles of the kernels for few tokens (few_tokens_launch.py), which then compute all of x; None: other
    kernels do. compile_only: compile the grouped GEMMs without a launch. Without few_tokens, a single token is computed
    by kernels for one token if they read this format of weights (is_of_one_token). The kernels for few tokens and for
    one token use neither `tile` nor `quantized`.
    """
    if few_tokens is not None and not compile_only:
        return experts_of_few_tokens(
            x,
            experts,
            factors,
            weights.gate_up,
            weights.down,
            activation,
            few_tokens,
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
        )
    if is_of_one_token(len(x), weights.gate_up.format) and not compile_only:
        return experts_of_one_token(
            x,
            experts,
            factors,
            weights.gate_up,
            weights.down,
            activation,
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
        )
    dtype, top_k = x.dtype, experts.shape[1]
    per_block = weights.gate_up.format.kind == "block"
    pairs = sorter(experts, tile.rows)
    scales = None
    if quantized is not None:
        x, scales = quantize_activations(x, quantized, per_block=per_block)

    def multiplied(weight: StackedWeight, inputs: int) -> StackedWeight:
        return dequantize(weight, inputs, dtype, compile_only=compile_only) if tile.dequantized else weight

    # Dequantized weights are freed after the product, so both projections and all layers use the same memory.
    hidden = grouped_matmul(
        x,
        multiplied(weights.gate_up, x.shape[1]),
        pairs,
        tile.rows,
        tile.gate_up,
        dtype=dtype,
        top_k=top_k,
        gather=True,
        activation=activation,
        bias=weights.gate_up_bias,
        x_scales=scales,
        compile_only=compile_only,
    )
    if quantized is not None:
        hidden, scales = quantize_activations(hidden, quantized, per_block=per_block)
    results = grouped_matmul(
        hidden,
        multiplied(weights.down, hidden.shape[1]),
        pairs,
        tile.rows,
        tile.down,
        dtype=dtype,
        scatter=True,
        bias=weights.down_bias,
        x_scales=scales,
        compile_only=compile_only,
    )
    return results[: len(experts)] if compile_only else combine(results, experts, factors)


def is_of_one_token(tokens: int, form: WeightFormat) -> bool:
    """Whether the kernels for one token, which use no tiles, compute this many tokens with weights of this format."""
    return tokens == 1 and form.kind in KINDS_OF_ONE_TOKEN
