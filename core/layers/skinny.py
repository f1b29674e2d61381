"""Unquantized linear layers where few rows go through Triton kernels; which ones, measurement decides (tuning.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.core.kernels.activation import silu_and_mul
from engine.core.kernels.argmax import argmax_rows
from engine.core.kernels.skinny_launch import (
    MOST_ROWS,
    Problem,
    SkinnyLaunch,
    Tile,
    Workspace,
    default_tile,
)
from engine.core.layers.linear import PlainKernel, merge
from engine.core.quant import LinearSpec

BUCKETS = (1, 2, 4, 8, MOST_ROWS)
"""Numbers of rows for which a kernel is chosen; others take the next one's."""


class FewRows:
    """How one multiplication is done, by its number of rows: `launches[rows]`, None for torch's own."""

    def __init__(self, problem: Problem, workspace: Workspace) -> None:
        self.problem = problem
        self.launches: list[SkinnyLaunch | None] = [None] * (MOST_ROWS + 1)
        self._workspace = workspace
        for rows in BUCKETS:
            self.choose(rows, default_tile(problem, rows, workspace.device))

    def choose(self, bucket: int, tile: Tile | None) -> None:
        """Set the kernel of a bucket; None: torch's own."""
        below = max((rows for rows in BUCKETS if rows < bucket), default=0)
        launch = None if tile is None else self.make(bucket, tile)
        self.launches[below + 1 : bucket + 1] = [launch] * (bucket - below)

    def make(self, rows: int, tile: Tile) -> SkinnyLaunch:
        """A kernel that is not chosen yet."""
        return SkinnyLaunch(self.problem, tile, rows, self._workspace)


class FewRowsTables:
    """One `FewRows` for all layers of one shape."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._workspace = Workspace(self.device)
        self._tables: dict[Problem, FewRows] = {}

    def table(self, problem: Problem) -> FewRows:
        """The table of a shape, made when it is first asked for."""
        if problem not in self._tables:
            self._tables[problem] = FewRows(problem, self._workspace)
        return self._tables[problem]


class SkinnyKernel(PlainKernel):
    """Weights in the model's own type; up to 16 rows by the kernels chosen, more by torch."""

    def __init__(self, spec: LinearSpec, tables: FewRowsTables) -> None:
        super().__init__(spec)
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        self.few_rows = tables.table(
            Problem(
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

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        launch = self._plain[x.shape[0]] if x.dim() == 2 and x.shape[0] <= MOST_ROWS else None
        return F.linear(x, weights["weight"], bias) if launch is None else launch(x, weights["weight"], bias)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See LinearKernel."""
        launch = self._gated[x.shape[0]] if x.dim() == 2 and x.shape[0] <= MOST_ROWS else None
        if launch is None:
            return silu_and_mul(F.linear(x, weights["weight"], bias))
        return launch(x, weights["weight"], bias)


def by_torch(problem: Problem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The same multiplication without a kernel for few rows: what one must be faster than."""
    y = F.linear(x, weight, bias)
    if problem.epilogue == "gated":
        silu_and_mul(y)
    elif problem.epilogue == "argmax":
        argmax_rows(y)
