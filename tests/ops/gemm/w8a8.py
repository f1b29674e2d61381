"""Random quantized values and scales of one weight, and the product with it in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def random_codes(shape: Any, kind: Any, device: Any) -> Any:
    if kind == "int8":
        return torch.randint(-127, 128, shape, device=device).to(torch.int8)
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn)


def before_others(values: Any, multiple: int) -> Any:
    """The same rows in memory for a multiple of a number of rows, of which the others are NaN or large."""
    size = (-(-values.shape[0] // multiple) * multiple, values.shape[1])
    memory = torch.full(size, 127, dtype=torch.int8, device=values.device).view(values.dtype)  # e4m3's NaN
    memory[: values.shape[0]].copy_(values)
    return memory[: values.shape[0]]


def wide(scale: Any, shape: Any, rows: Any, columns: int = 128) -> Any:
    """A scale for every number, of scales of blocks: numbers are looked up one by one."""
    row = torch.arange(shape[0], device=scale.device) // rows
    column = torch.arange(shape[1], device=scale.device) // columns
    return scale[row][:, column]


class Operands:
    """scale_rows: 0, or the outputs that share a scale with 128 inputs."""

    def __init__(
        self,
        kind: Any,
        rows: Any,
        weight_rows: Any,
        inputs: Any,
        device: Any,
        *,
        scale_rows: int = 0,
        biased: bool = False,
        half: torch.dtype = torch.float16,
    ) -> None:
        self.x = (torch.randn(rows, inputs, device=device) / inputs**0.25).to(half)
        self.weight = random_codes((weight_rows, inputs), kind, device)
        groups = -(-inputs // 128)
        size = (-(-weight_rows // scale_rows), groups) if scale_rows else (weight_rows,)
        unit = 0.02 if kind == "int8" else 1.0
        self.scale = (torch.rand(size, device=device) + 0.5) * unit / inputs**0.5
        self.x_codes = random_codes((rows, inputs), kind, device)
        self.x_scale = (torch.rand(rows, device=device) + 0.5) * unit
        self.bias = torch.randn(weight_rows, device=device).to(half) if biased else None
        shape = self.weight.shape
        factor = wide(self.scale, shape, scale_rows) if scale_rows else self.scale[:, None]
        self._wide_weight = self.weight.double() * factor.double()
        self._wide_x = self.x_codes.double() * self.x_scale[:, None].double()

    def exact(self, *, codes: Any) -> Any:
        x = self._wide_x if codes else self.x.double()
        return F.linear(x, self._wide_weight, None if self.bias is None else self.bias.double())


def check_close(got: Any, exact: Any, limit: Any) -> None:
    """By relative norm; a NaN fails."""
    assert got.shape == exact.shape
    assert float((got.double() - exact).norm() / exact.norm()) < limit
    torch.testing.assert_close(got.double(), exact, rtol=8 * limit, atol=8 * limit * float(exact.abs().max()))
