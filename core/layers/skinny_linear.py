"""Unquantized linear layers where few rows go through Triton kernels; which ones, measurement decides (tuning.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from engine.core.autotune.op import AutotunedCall, AutotunedOp, Operands, version_of
from engine.core.layers.base import torch_dtype
from engine.core.layers.linear import PlainKernel, merge
from engine.core.quant.base import LinearSpec
from engine.ops.activation.silu_and_mul import silu_and_mul
from engine.ops.common import launch
from engine.ops.gemm import skinny, skinny_launch
from engine.ops.gemm.skinny_launch import (
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

BUCKETS = (1, 2, 4, 8, SKINNY_MAX_ROWS)
"""Numbers of rows for which a kernel is chosen; others take the next one's."""


class FewRows(AutotunedOp[SkinnyTile | None]):
    """How one multiplication is done, by its number of rows: `launches[rows]`, None for torch's own."""

    def __init__(self, shape: GemmShape, workspace: Workspace) -> None:
        self.shape = shape
        self.launches: list[SkinnyLaunch | None] = [None] * (SKINNY_MAX_ROWS + 1)
        self._workspace = workspace
        for rows in BUCKETS:
            self.choose(rows, default_tile(shape, rows, workspace.device))

    @property
    def key(self) -> str:
        """See AutotunedOp."""
        return str(self.shape)

    @property
    def version(self) -> str:
        """See AutotunedOp."""
        return version_of(launch, skinny, skinny_launch)

    @property
    def inputs(self) -> int:
        """See AutotunedOp."""
        return self.shape.inputs

    @property
    def dtype(self) -> torch.dtype:
        """See AutotunedOp."""
        return torch_dtype(self.shape.dtype)

    @property
    def row_classes(self) -> Sequence[int]:
        """See AutotunedOp."""
        return BUCKETS

    def candidates(self, rows: int) -> Sequence[SkinnyTile | None]:
        """Torch's own first."""
        return [None, *candidates(self.shape, rows, self._workspace.device)]

    def refine(self, rows: int, ranked: Sequence[SkinnyTile | None]) -> Sequence[SkinnyTile | None]:
        """The best number of bytes to fetch in advance with the fastest tile."""
        fastest = next((tile for tile in ranked if tile is not None), None)
        return [] if fastest is None else with_ahead(fastest, self.shape, self.dtype.itemsize)

    def name(self, candidate: SkinnyTile | None) -> str:
        """See AutotunedOp."""
        return "library" if candidate is None else str(candidate)

    def compile(self, rows: int, candidate: SkinnyTile | None, operands: Operands) -> None:
        """See AutotunedOp."""
        if candidate is not None:
            weight = operands.weights["weight"]
            self.make(rows, candidate).compile(weight.new_empty(rows, weight.shape[1]), weight, operands.bias)

    def run(self, candidate: SkinnyTile | None, x: torch.Tensor, operands: Operands) -> torch.Tensor:
        """See AutotunedOp; the largest outputs for argmax."""
        weight = operands.weights["weight"]
        if candidate is None:
            return by_torch(self.shape, x, weight, operands.bias)
        kernel = self.make(x.shape[0], candidate)
        return kernel.peaks(x, weight)[0] if self.shape.epilogue == "argmax" else kernel(x, weight, operands.bias)

    def choose(self, rows: int, candidate: SkinnyTile | None) -> None:
        """Set the kernel of a bucket; None: torch's own."""
        below = max((bucket for bucket in BUCKETS if bucket < rows), default=0)
        made = None if candidate is None else self.make(rows, candidate)
        self.launches[below + 1 : rows + 1] = [made] * (rows - below)

    def make(self, rows: int, tile: SkinnyTile) -> SkinnyLaunch:
        """A kernel that is not chosen yet."""
        return SkinnyLaunch(self.shape, tile, rows, self._workspace)


class FewRowsTables:
    """One `FewRows` for all layers of one shape."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._workspace = Workspace(self.device)
        self._tables: dict[GemmShape, FewRows] = {}

    def table(self, shape: GemmShape) -> FewRows:
        """The table of a shape, made when it is first asked for."""
        if shape not in self._tables:
            self._tables[shape] = FewRows(shape, self._workspace)
        return self._tables[shape]


class SkinnyKernel(PlainKernel):
    """Weights in the model's own type; up to 16 rows by the kernels chosen, more by torch."""

    def __init__(self, spec: LinearSpec, tables: FewRowsTables) -> None:
        super().__init__(spec)
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        self.few_rows = tables.table(
            GemmShape(
                epilogue="gated" if spec.gated else "plain",
                outputs=outputs // 2 if spec.gated else outputs,
                inputs=spec.rank_inputs,
                dtype=spec.dtype,
            )
        )
        launches = self.few_rows.launches
        self._plain = [None] * len(launches) if spec.gated else launches
        self._gated = launches if spec.gated else [None] * len(launches)

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """One matrix, the parts' outputs one below the other."""
        return {"weight": merge(list(loaded.values()), self._spec.dtype)}

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """See LinearKernel."""
        return [AutotunedCall(op=self.few_rows, operands=Operands(weights=weights, bias=bias))]

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        launch = self._plain[x.shape[0]] if x.dim() == 2 and x.shape[0] <= SKINNY_MAX_ROWS else None
        return F.linear(x, weights["weight"], bias) if launch is None else launch(x, weights["weight"], bias)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See LinearKernel."""
        launch = self._gated[x.shape[0]] if x.dim() == 2 and x.shape[0] <= SKINNY_MAX_ROWS else None
        if launch is None:
            return silu_and_mul(F.linear(x, weights["weight"], bias))
        return launch(x, weights["weight"], bias)


def by_torch(shape: GemmShape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same multiplication without a kernel for few rows: what one must be faster than."""
    y = F.linear(x, weight, bias)
    if shape.epilogue == "gated":
        return silu_and_mul(y)
    return argmax_rows(y)[0] if shape.epilogue == "argmax" else y
