"""Integer products on CPUs with and without exact instructions for them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.quant.base import LinearPart, LinearSpec
from engine.plugins.quant import w8_cpu
from engine.plugins.quant.w8_cpu import IntegerKernel, products_are_exact
from engine.plugins.quant.w8_kernel import TOKEN, W8Format

STORED = W8Format(dtype="int8", granularity="channel", activations=TOKEN, scale_names=("scale",), scale_vector=True)


def products(rows: int, inputs: int, outputs: int, x: int | None = None, weight: int | None = None) -> Any:
    """A kernel's products of int8 numbers, the exact products, and the bytes of the kernel's weight; None: random."""
    part = LinearPart(name="q", out_features=outputs)
    spec = LinearSpec(parts=(part,), in_features=inputs, bias=False, dtype="float64")
    stored = torch.randint(-128, 128, (outputs, inputs)) if weight is None else torch.full((outputs, inputs), weight)
    given = torch.randint(-127, 128, (rows, inputs)) if x is None else torch.full((rows, inputs), x)
    given[:, 0] = 127  # the scale of activations is 1
    kernel = IntegerKernel(spec, STORED)
    weights = kernel.prepare({"q.weight": stored.to(torch.int8), "q.scale": torch.ones(outputs)})
    return kernel.apply(given.double(), weights, None), (given @ stored.T).double(), weights["weight"].nbytes


def check_products() -> None:
    for rows, inputs, outputs in ((1, 64, 64), (3, 256, 128), (40, 512, 96), (1, 1024, 3), (7, 100, 33)):
        for x, weight in ((None, None), (127, 127), (127, -128), (-127, 127), (-127, -128)):
            got, exact, _ = products(rows, inputs, outputs, x, weight)
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=0)


def test_integer_kernel_is_exact() -> None:
    check_products()


def test_integer_kernel_is_exact_where_weights_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products(3, 64, 32)[2] == (1 if products_are_exact() else 2) * 32 * 64
    monkeypatch.setattr(w8_cpu, "products_are_exact", lambda: False)
    assert products(3, 64, 32)[2] == 2 * 32 * 64
    check_products()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the saturating instructions are x86's")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_integer_kernel_is_exact_where_instructions_saturate(instructions: str) -> None:
    names = "check_products, products_are_exact"
    script = f"from {__name__} import {names}; print(products_are_exact()); check_products()"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": os.pathsep.join(sys.path)}
    command, root = [sys.executable, "-c", script], Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if done.stdout.split() == ["True"]:
        pytest.skip("oneDNN does not multiply int8 here, or ignores ONEDNN_MAX_CPU_ISA")
