"""Experts by Triton kernels, with weights of any format of ops/experts/weights.py, and their autotuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from engine.core.autotune.op import AutotunedCall, AutotunedOp, Operands, version_of
from engine.core.layers.base import torch_dtype
from engine.core.layers.experts import PlainExperts
from engine.core.layers.routing import RoutingSpec
from engine.core.quant.experts import ExpertsBias, ExpertsSpec, Routing
from engine.ops.activation import act_and_mul, quantize_rows
from engine.ops.common import fast_math, gluon_copies, gluon_tiles, launch
from engine.ops.experts import (
    combine,
    dequantize,
    experts_mlp,
    grouped_matmul,
    grouped_matmul_4bit,
    pack,
    persistent_grouped,
    quantize,
    sort,
    tiles,
    unpack,
    weights as stacked,
)
from engine.ops.experts.experts_mlp import ExpertsTile, ExpertsWeights
from engine.ops.experts.few_tokens_launch import MAX_TOKENS, FewTokensTiles, few_tokens_tiles, suits_few_tokens
from engine.ops.experts.route import route
from engine.ops.experts.sort import PairSorter
from engine.ops.experts.tiles import ROW_CLASSES, ExpertsShape
from engine.ops.experts.weights import StackedWeight, WeightFormat

MAX_DEQUANTIZED_SHARE = 1 / 32
"""Maximum share of a GPU's memory for the dequantized weights of a layer's gate and up projections. All layers use the
same memory."""


class FusedExperts(AutotunedOp[ExpertsTile]):
    """The experts of a layer, by Triton kernels. Layers of one shape and format share their tuning (`key`).

    Operands' weights: gate_up, down, gate_up_scales, down_scales, gate_up_factors, down_factors, as
    ops/experts/weights.py describes them; those that the format lacks are left out.
    """

    def __init__(self, spec: ExpertsSpec, form: WeightFormat, quantized: torch.dtype | None = None) -> None:
        """quantized: the dtype that activations are quantized to, except those of few tokens. None: they are not."""
        device = torch.device(spec.device)
        self.shape = ExpertsShape(
            num_experts=spec.num_experts,
            rank_experts=len(spec.rank_experts),
            top_k=spec.top_k,
            hidden=spec.hidden_size,
            intermediate=spec.rank_intermediate,
            format=form,
            activation=spec.activation,
            dtype=spec.dtype,
            quantized="" if quantized is None else str(quantized).removeprefix("torch."),
            wgmma=launch.has_wgmma(device),
            max_dequantized_bytes=int(_memory(device) * MAX_DEQUANTIZED_SHARE),
        )
        self._quantized = quantized
        self._few_tokens: list[FewTokensTiles | None] = [
            few_tokens_tiles(self.shape, tokens, launch.num_sms(device))
            if suits_few_tokens(self.shape, tokens)
            else None
            for tokens in range(MAX_TOKENS + 1)
        ]
        """By number of tokens, the tiles of the kernels for few tokens, where they are used."""
        self._sorter = PairSorter(len(spec.rank_experts), spec.top_k, device)
        self._chosen: dict[int, ExpertsTile] = {}
        self._last: tuple[Mapping[str, torch.Tensor], ExpertsBias | None, ExpertsWeights] | None = None

    def __call__(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        """As ExpertsKernel.apply."""
        few_tokens = self._tiles_of_few(len(x))
        return self._multiply(x, routing, self._read(weights, bias), self.tile(len(x)), few_tokens)

    def tile(self, tokens: int) -> ExpertsTile:
        """The tiles chosen for this many tokens, else the default."""
        return self._chosen.get(tiles.row_class(tokens)) or tiles.default_tile(self.shape, tokens)

    def quantizes(self, tokens: int) -> bool:
        """Whether the activations of this many tokens are quantized. The number alone decides, not the tuning.

        Those of one token are not, nor those of few tokens where the kernels for few tokens are used. For more tokens,
        converting 8-bit weights to 16 bits would take longer than reading them.
        """
        return self._quantized is not None and not self._is_untiled(tokens)

    def _tiles_of_few(self, tokens: int) -> FewTokensTiles | None:
        return self._few_tokens[tokens] if tokens <= MAX_TOKENS else None

    def _is_untiled(self, tokens: int) -> bool:
        """Whether this many tokens are computed without an ExpertsTile, by the kernels for one or for few tokens."""
        one = experts_mlp.is_of_one_token(tokens, self.shape.format)
        return one or self._tiles_of_few(tokens) is not None

    def _multiply(
        self,
        x: torch.Tensor,
        routing: Routing,
        weights: ExpertsWeights,
        tile: ExpertsTile,
        few_tokens: FewTokensTiles | None = None,
        *,
        compile_only: bool = False,
    ) -> torch.Tensor:
        """few_tokens: None also where the tile is measured, with a number of tokens that needs none."""
        is_quantized = few_tokens is None and not experts_mlp.is_of_one_token(len(x), self.shape.format)
        return experts_mlp.experts_mlp(
            x.contiguous(),
            routing.experts,
            routing.weights,
            weights,
            self.shape.activation,
            tile,
            self._sorter,
            quantized=self._quantized if is_quantized else None,
            few_tokens=few_tokens,
            compile_only=compile_only,
        )

    def _read(self, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None) -> ExpertsWeights:
        """The weights as kernels take them, kept from call to call: a layer passes the same objects each time."""
        if self._last is None or self._last[0] is not weights or self._last[1] is not bias:
            made = ExpertsWeights(
                gate_up=self._stacked(weights, "gate_up"),
                down=self._stacked(weights, "down"),
                gate_up_bias=None if bias is None else bias.gate_up,
                down_bias=None if bias is None else bias.down,
            )
            self._last = weights, bias, made
        return self._last[2]

    def _stacked(self, weights: Mapping[str, torch.Tensor], name: str) -> StackedWeight:
        return StackedWeight(
            values=weights[name],
            format=self.shape.format,
            scales=weights.get(f"{name}_scales"),
            factors=weights.get(f"{name}_factors"),
        )

    @property
    def key(self) -> str:
        return str(self.shape)

    @property
    def version(self) -> str:
        experts = (
            combine,
            dequantize,
            experts_mlp,
            grouped_matmul,
            grouped_matmul_4bit,
            pack,
            persistent_grouped,
            quantize,
            sort,
            stacked,
            tiles,
            unpack,
        )
        return version_of(launch, fast_math, gluon_copies, gluon_tiles, act_and_mul, quantize_rows, *experts)

    @property
    def inputs(self) -> int:
        return self.shape.hidden

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.shape.dtype)

    @property
    def row_classes(self) -> Sequence[int]:
        """Row classes in which some number of tokens uses a tile."""
        classes = pairwise((0, *ROW_CLASSES))
        return [last for first, last in classes if not all(map(self._is_untiled, range(first + 1, last + 1)))]

    def candidates(self, rows: int) -> Sequence[ExpertsTile]:
        return tiles.candidates(self.shape, rows)

    def refine(self, rows: int, ranked: Sequence[ExpertsTile]) -> Sequence[ExpertsTile]:
        """Other tiles of the down projection next to the fastest of gate and up."""
        return tiles.other_down_tiles(self.shape, ranked[0]) if ranked else ()

    def compile(self, rows: int, candidate: ExpertsTile, operands: Operands) -> None:
        x = torch.empty((rows, self.inputs), dtype=self.dtype, device=operands.weights["gate_up"].device)
        weights = self._read(operands.weights, None)
        self._multiply(x, self._even_routing(x), weights, candidate, compile_only=True)

    def run(self, candidate: ExpertsTile, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """As AutotunedOp.run, with tokens spread evenly over the experts, and without biases."""
        return self._multiply(x, self._even_routing(x), self._read(operands.weights, None), candidate)

    def choose(self, rows: int, candidate: ExpertsTile) -> None:
        self._chosen[rows] = candidate

    def _even_routing(self, x: torch.Tensor) -> Routing:
        """A routing of equally many tokens to each expert, the experts of a token far apart. Computed on the device."""
        shape = self.shape
        slots = torch.arange(len(x) * shape.top_k, device=x.device, dtype=torch.int32).view(len(x), shape.top_k)
        step = max(shape.num_experts // shape.top_k, 1)
        experts = (slots % shape.top_k * step + slots // shape.top_k) % shape.num_experts
        experts = experts.masked_fill(experts >= shape.rank_experts, -1).to(torch.int32)
        return Routing(experts, torch.ones_like(experts, dtype=torch.float32))


def _memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class FusedPlainExperts(PlainExperts):
    """Unquantized weights and Triton kernels."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__(spec)
        self.op = FusedExperts(spec, WeightFormat(kind="plain"))

    def apply(
        self, x: torch.Tensor, routing: Routing, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None
    ) -> torch.Tensor:
        return self.op(x, routing, weights, bias)

    def autotuned_calls(self, weights: Mapping[str, torch.Tensor], bias: ExpertsBias | None) -> Sequence[AutotunedCall]:
        return [AutotunedCall(op=self.op, operands=Operands(weights=weights))]


def fused_route(logits: torch.Tensor, spec: RoutingSpec, rank_experts: range) -> Routing:
    """Route by one Triton kernel. A Route."""
    return Routing(
        *route(
            logits,
            spec.top_k,
            sigmoid=spec.scoring == "sigmoid",
            renormalize=spec.renormalize,
            scale=spec.scale,
            rank_experts=rank_experts,
        )
    )
