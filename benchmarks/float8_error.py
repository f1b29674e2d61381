"""Error of attention over a float8 KV cache, by context length and by the scale of keys and values.

    python benchmarks/float8_error.py [--contexts 128,1024,8192,65536] [--json FILE]

Random queries, keys and values of a normal distribution, heads of 128, in which a query sees the whole context. Two
errors, relative to attention in float64 over the keys and values before they are stored, as norms over all outputs:
that of storing them (float64 over what is stored), and that of the kernel (the torch backend's arithmetic, float32,
over what is stored, next to float64 over the same). Sharpness is the standard deviation of the scores: real models have
1 to 4. A scale of 1 is the calibrated one: the largest magnitude over 448.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import frozen

from engine.cli.bench.report import Row, report, write
from engine.cli.tables import print_table
from engine.core.attention import AttentionSpec, KVPool
from engine.core.quant import FLOAT8, FLOAT8_MAX, KVScales

HEADS = 16
HEAD_DIM = 128
CONTEXTS = "128,1024,8192,65536"
SCALES = (1 / 8, 1.0, 64.0, 4096.0)
"""Factors on the calibrated scale; below 1 the largest numbers are clipped, above 1 small ones lose digits."""
SHARPNESS = (1.0, 4.0)


@frozen(kw_only=True)
class Error:
    """Relative errors of one case."""

    context: int
    sharpness: float
    scale: float
    stored: float
    kernel: float

    @property
    def case(self) -> str:
        return f"context {self.context}, sharpness {self.sharpness:g}, scale {self.scale:g}"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query per head. q: [heads, dim]; k, v: [heads, context, dim], already scaled."""
    scores = torch.einsum("hd,hkd->hk", q, k)
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), v)


def store(k: torch.Tensor, v: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor, KVScales]:
    """Keys and values as a cache stores them, [heads, context, dim] each, and its scales: `factor` times the calibrated
    ones."""
    context = k.shape[1]
    key, value = (factor * float(part.abs().max()) / FLOAT8_MAX for part in (k, v))
    scales = KVScales(key=key, value=value)
    spec = AttentionSpec(
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        scale=1.0,
        dtype="float32",
        kv_dtype=FLOAT8,
        block_size=context,
        max_len=context,
        sliding_windows=(None,),
    )
    pool = KVPool(spec, 1, "cpu", (scales,))
    pool.write(0, k.transpose(0, 1), v.transpose(0, 1), torch.arange(context))
    return pool.keys[0][0].transpose(0, 1), pool.values[0][0].transpose(0, 1), scales


def norm_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative norm of the error."""
    return float((found.double() - exact).norm() / exact.norm())


def errors(contexts: list[int]) -> Iterator[Error]:
    """All cases."""
    for context, sharpness in itertools.product(contexts, SHARPNESS):
        generator = torch.Generator().manual_seed(context)
        k, v = (torch.randn(HEADS, context, HEAD_DIM, generator=generator) for _ in range(2))
        q = torch.randn(HEADS, HEAD_DIM, generator=generator) * (sharpness / HEAD_DIM**0.5)
        exact = attend(q.double(), k.double(), v.double())
        for factor in SCALES:
            stored_k, stored_v, scales = store(k, v, factor)
            wide = attend(q.double(), stored_k.double() * scales.key, stored_v.double() * scales.value)
            computed = attend(q * scales.key, stored_k.float(), stored_v.float()) * scales.value
            yield Error(
                context=context,
                sharpness=sharpness,
                scale=factor,
                stored=norm_error(wide, exact),
                kernel=norm_error(computed, wide),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default=CONTEXTS, help="tokens, with commas between")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    with torch.inference_mode():
        found = list(errors([int(context) for context in arguments.contexts.split(",")]))
    print_table(
        ("context", "sharpness", "scale", "stored", "kernel"),
        [
            (one.context, f"{one.sharpness:g}", f"{one.scale:g}", f"{one.stored:.2%}", f"{one.kernel:.1e}")
            for one in found
        ],
        title="relative error of attention over a float8 cache",
    )
    if arguments.json is not None:
        rows = [
            Row(metric=metric, case=one.case, value=value, unit="relative norm")
            for one in found
            for metric, value in (("error of storing", one.stored), ("error of the arithmetic", one.kernel))
        ]
        settings = {"heads": HEADS, "head_dim": HEAD_DIM, "scales": SCALES, "sharpness": SHARPNESS}
        write(arguments.json, report("float8-error", "cpu", rows, settings))


if __name__ == "__main__":
    main()
