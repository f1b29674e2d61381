"""Unquantized linear layers with autotuned Triton kernels for skinny GEMMs: up to SKINNY_MAX_ROWS rows of x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.autotune.op import AutotunedCall, AutotunedOp, Operands, version_of
from engine.core.layers.base import torch_dtype
from engine.core.layers.linear import PlainKernel, merge
from engine.core.quant.base import ACTIVATIONS, LinearSpec
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.common import launch, polling
from engine.ops.gemm import (
    few_rows,
    skinny,
    skinny_forms,
    skinny_launch,
    skinny_matrix,
    split_k_polling,
    w16_few_rows,
    weight_tile,
)
from engine.ops.gemm.skinny_launch import (
    HEAD_MAX_ROWS,
    SKINNY_MAX_ROWS,
    GemmShape,
    SkinnyLaunch,
    SkinnyTile,
    Workspace,
    candidates,
    default_tile,
    with_ahead,
)
from engine.ops.sampling.argmax import argmax_rows

ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64, SKINNY_MAX_ROWS)
"""Numbers of rows for which a kernel is chosen; other numbers use the kernel of the next larger one."""


class SkinnyGemm(AutotunedOp[SkinnyTile | None]):
    """A GEMM of one shape. `launches[rows]` is the kernel chosen for that many rows; None: the library's."""

    max_rows = SKINNY_MAX_ROWS
    """Maximum rows of x; more are the library's."""

    def __init__(self, shape: GemmShape, workspace: Workspace) -> None:
        self.shape = shape
        self.launches: list[SkinnyLaunch | None] = [None] * (self.max_rows + 1)
        self._workspace = workspace
        for rows in self.row_classes:
            self.choose(rows, default_tile(shape, rows, workspace.device))

    @property
    def key(self) -> str:
        return str(self.shape)

    @property
    def version(self) -> str:
        kernels = (few_rows, skinny, skinny_matrix, w16_few_rows)
        return version_of(launch, polling, skinny_forms, skinny_launch, split_k_polling, weight_tile, *kernels)

    @property
    def inputs(self) -> int:
        return self.shape.inputs

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.shape.dtype)

    @property
    def row_classes(self) -> Sequence[int]:
        return [rows for rows in ROW_CLASSES if rows <= self.max_rows]

    def candidates(self, rows: int) -> Sequence[SkinnyTile | None]:
        """As AutotunedOp.candidates; the library's GEMM first."""
        return [None, *candidates(self.shape, rows, self._workspace.device)]

    def refine(self, rows: int, ranked: Sequence[SkinnyTile | None]) -> Sequence[SkinnyTile | None]:
        """The fastest tile with different numbers of bytes to prefetch."""
        fastest = next((tile for tile in ranked if tile is not None), None)
        return [] if fastest is None else with_ahead(fastest, self.shape, self.dtype.itemsize)

    def name(self, candidate: SkinnyTile | None) -> str:
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: SkinnyTile | None, operands: Operands) -> None:
        if candidate is not None:
            weight = operands.weights["weight"]
            self.make(rows, candidate).compile(weight.new_empty(rows, weight.shape[1]), weight, operands.bias)

    def run(self, candidate: SkinnyTile | None, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """As AutotunedOp.run; returns the max logits if the epilogue is argmax."""
        weight = operands.weights["weight"]
        if candidate is None:
            return library_gemm(self.shape, x, weight, operands.bias)
        kernel = self.make(x.shape[0], candidate)
        return kernel.peaks(x, weight)[0] if self.shape.epilogue == "argmax" else kernel(x, weight, operands.bias)

    def choose(self, rows: int, candidate: SkinnyTile | None) -> None:
        """Set the kernel of a row class; None: the library's."""
        kernel = None if candidate is None else self.make(rows, candidate)
        below = self._rows_below(rows)
        self.launches[below + 1 : rows + 1] = [kernel] * (rows - below)

    def _rows_below(self, rows: int) -> int:
        """The row class below one; 0 if there is none."""
        return max((other for other in self.row_classes if other < rows), default=0)

    def make(self, rows: int, tile: SkinnyTile) -> SkinnyLaunch:
        """A kernel for up to that many rows, without choosing it."""
        return SkinnyLaunch(self.shape, tile, rows, self._workspace)


class HeadGemm(SkinnyGemm):
    """The GEMM of an LM head. The kernel is chosen for greedy tokens; logits are computed by the same tiles, so that a
    greedy token is the first of the largest logits, bit for bit, whether or not the logits are kept."""

    max_rows = HEAD_MAX_ROWS

    def __init__(self, outputs: int, inputs: int, dtype: str, workspace: Workspace) -> None:
        self.logits_launches: list[SkinnyLaunch | None] = [None] * (HEAD_MAX_ROWS + 1)
        """As `launches`, returning the logits."""
        self._logits_shape = GemmShape(epilogue="plain", outputs=outputs, inputs=inputs, dtype=dtype)
        super().__init__(evolve(self._logits_shape, epilogue="argmax"), workspace)

    def compile(self, rows: int, candidate: SkinnyTile | None, operands: Operands) -> None:
        super().compile(rows, candidate, operands)
        if candidate is not None:
            weight = operands.weights["weight"]
            launch = SkinnyLaunch(self._logits_shape, candidate, rows, self._workspace)
            launch.compile(weight.new_empty(rows, weight.shape[1]), weight, None)

    def choose(self, rows: int, candidate: SkinnyTile | None) -> None:
        super().choose(rows, candidate)
        below = self._rows_below(rows)
        kernel = None if candidate is None else SkinnyLaunch(self._logits_shape, candidate, rows, self._workspace)
        self.logits_launches[below + 1 : rows + 1] = [kernel] * (rows - below)


class SkinnyGemms:
    """The skinny GEMMs of a model: one `SkinnyGemm` for all layers of one shape."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._workspace = Workspace(self.device)
        self._gemms: dict[GemmShape, SkinnyGemm] = {}

    def gemm(self, shape: GemmShape) -> SkinnyGemm:
        """The GEMM of a shape, made by the first call."""
        if shape not in self._gemms:
            self._gemms[shape] = SkinnyGemm(shape, self._workspace)
        return self._gemms[shape]

    def head_gemm(self, outputs: int, inputs: int, dtype: str) -> HeadGemm:
        """The GEMM of an LM head."""
        return HeadGemm(outputs, inputs, dtype, self._workspace)


class SkinnyKernel(PlainKernel):
    """Unquantized weights: skinny GEMM kernels up to SKINNY_MAX_ROWS rows, torch's linear beyond."""

    activations = ACTIVATIONS

    def __init__(self, spec: LinearSpec, gemms: SkinnyGemms) -> None:
        super().__init__(spec)
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        self.skinny_gemm = gemms.gemm(
            GemmShape(
                epilogue="gated" if spec.gated else "plain",
                outputs=outputs // 2 if spec.gated else outputs,
                inputs=spec.rank_inputs,
                dtype=spec.dtype,
                activation=spec.activation if spec.gated else "silu",
            )
        )
        launches = self.skinny_gemm.launches
        self._plain = [None] * len(launches) if spec.gated else launches
        self._gated = launches if spec.gated else [None] * len(launches)

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One matrix of all parts' outputs in order."""
        return {"weight": merge(list(loaded.values()), self._spec.dtype)}

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        return [AutotunedCall(op=self.skinny_gemm, operands=Operands(weights=weights, bias=bias))]

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        launch = self._plain[x.shape[0]] if x.dim() == 2 and x.shape[0] <= SKINNY_MAX_ROWS else None
        return F.linear(x, weights["weight"], bias) if launch is None else launch(x, weights["weight"], bias)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        launch = self._gated[x.shape[0]] if x.dim() == 2 and x.shape[0] <= SKINNY_MAX_ROWS else None
        if launch is None:
            return act_and_mul(F.linear(x, weights["weight"], bias), self._spec.activation)
        return launch(x, weights["weight"], bias)


def library_gemm(shape: GemmShape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same GEMM by torch, which a skinny kernel has to beat."""
    y = F.linear(x, weight, bias)
    if shape.epilogue == "gated":
        return act_and_mul(y, shape.activation)
    return argmax_rows(y)[0] if shape.epilogue == "argmax" else y
