"""Prefill attention over a float8 KV cache, in 16 bits and in float8: TFLOP/s and error. Needs a Hopper GPU.

    python benchmarks/float8_prefill.py [--json FILE]

Both are the Triton backend, with prefill_dtype auto and fp8; times include the conversion of keys and values. Random
queries, keys and values of a normal distribution, heads of 128, 32/8 heads. Errors are those of the last 128 tokens of
a context, relative to attention in float64 over what the cache stores, as norms over all outputs; next to them the
error of storing keys and values, relative to attention over the original ones, with calibrated scales as in
float8_error.py. Sharpness is the standard deviation of the scores: real models have 1 to 4. A needle is a key that has
half of the last token's weight; its rows give the error of that token alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from attention import BLOCK_SIZE, HEAD_DIM, Bench, microseconds
from attrs import frozen
from float8_error import norm_error

from engine.cli.bench.report import Row, report, write
from engine.cli.tables import print_table
from engine.core.attention import KVPool
from engine.core.quant import FLOAT8, FLOAT8_MAX, KVScales
from engine.plugins.attention.triton import TritonAttention
from engine.plugins.attention.triton_options import TritonOptions

HEADS = (32, 8)
SHAPES = ("4x2048", "1x8192 after 10000", "1x2048 after 14336", "1x20000")
CONTEXTS = (128, 1024, 8192, 32768)
SHARPNESS = (1.0, 4.0)
NEW = 128
DTYPES = ("auto", "fp8")


@frozen(kw_only=True)
class Errors:
    """Relative errors of one case: of storing, of prefill in 16 bits, and of prefill in float8."""

    case: str
    stored: float
    wide: float
    float8: float


def lengths_of(shape: str) -> list[tuple[int, int]]:
    """(cached, new) per sequence of SEQUENCESxNEW [after CACHED]."""
    sizes, _, cached = shape.partition(" after ")
    sequences, new = map(int, sizes.split("x"))
    return [(int(cached or 0), new)] * sequences


def run(bench: Bench, prefill_dtype: str, layer: int = 0) -> torch.Tensor:
    """The output of a layer."""
    backend = TritonAttention(bench.spec, bench.pool, TritonOptions(prefill_dtype=prefill_dtype))
    none = bench.q[:, :0]
    return backend.forward(layer, bench.q, none, none, backend.plan(bench.batch))


def time_shapes() -> Iterator[Row]:
    """Microseconds and TFLOP/s per layer."""
    for shape in SHAPES:
        lengths = lengths_of(shape)
        bench = Bench.make(HEADS, lengths, 1, FLOAT8)
        pairs = sum(cached * new + new * (new + 1) / 2 for cached, new in lengths)
        baseline = None
        for prefill_dtype in DTYPES:
            backend = TritonAttention(bench.spec, bench.pool, TritonOptions(prefill_dtype=prefill_dtype))
            plan, none = backend.plan(bench.batch), bench.q[:, :0]
            spent = microseconds(lambda b=backend, p=plan, q=bench.q, n=none: b.forward(0, q, n, n, p), 9)
            rate = 4 * HEAD_DIM * HEADS[0] * pairs / spent / 1e6
            print(f"{shape:<20}{prefill_dtype:<6}{spent:9.1f} us {rate:7.1f} TFLOP/s", flush=True)
            case = f"{shape}, prefill_dtype {prefill_dtype}"
            yield Row(metric="time per layer", case=case, value=spent, unit="us")
            yield Row(
                metric="rate",
                case=case,
                value=rate,
                unit="TFLOP/s",
                baseline=baseline,
                baseline_name=None if baseline is None else "prefill_dtype auto",
            )
            baseline = rate


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last tokens in float64. q: [new, heads, dim]; k, v: [context, kv_heads, dim]."""
    new, context = len(q), len(k)
    hidden = torch.arange(context, device=q.device) > torch.arange(context - new, context, device=q.device)[:, None]
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        scores = (q[:, head].double() @ k[:, head // group].double().T) * scale
        out[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head // group].double()
    return out


def measure_errors() -> Iterator[Errors]:
    """All cases."""
    for context in CONTEXTS:
        for sharpness in SHARPNESS:
            torch.manual_seed(context)
            bench = Bench.make(HEADS, [(context - NEW, NEW)], 1, FLOAT8)
            q = bench.q * sharpness
            k, v = (torch.randn(context, HEADS[1], HEAD_DIM, device="cuda") for _ in range(2))
            # The first head of each group finds a key that weighs as much as all others together.
            needle = context // 3
            direction = q[-1, :: HEADS[0] // HEADS[1]].float()
            score = torch.tensor(float(context)).log() + sharpness**2 / 2
            found = direction * (score / bench.spec.scale) / direction.square().sum(-1, keepdim=True)
            k[needle] = found
            key, value = (float(part.abs().max()) / FLOAT8_MAX for part in (k, v))
            pool = KVPool(bench.spec, bench.batch.block_tables.shape[1], "cuda", (KVScales(key=key, value=value),))
            table = bench.batch.block_tables[0].long()
            stored = []
            for part, tensor, scale in ((k, pool.keys[0], key), (v, pool.values[0], value)):
                rounded = (part / scale).to(torch.float8_e4m3fn)
                slots = torch.arange(context, device="cuda")
                tensor[table[slots // BLOCK_SIZE], slots % BLOCK_SIZE] = rounded
                stored.append(rounded.double() * scale)
            bench = attrs.evolve(bench, pool=pool, q=q)
            exact = attend(q, *stored, bench.spec.scale)
            before = attend(q, k, v, bench.spec.scale)
            outs = [run(bench, prefill_dtype) for prefill_dtype in DTYPES]
            at = slice(None, -1), slice(None)
            last = -1, slice(None, None, HEADS[0] // HEADS[1])
            for name, rows in (("", at), (", needle", last)):
                yield Errors(
                    case=f"context {context}, sharpness {sharpness:g}{name}",
                    stored=norm_error(exact[rows], before[rows]),
                    wide=norm_error(outs[0][rows], exact[rows]),
                    float8=norm_error(outs[1][rows], exact[rows]),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    with torch.inference_mode():
        rows = list(time_shapes())
        found = list(measure_errors())
    print_table(
        ("case", "storing", "16 bits", "float8"),
        [(one.case, f"{one.stored:.2%}", f"{one.wide:.2%}", f"{one.float8:.2%}") for one in found],
        title="relative error of prefill attention over a float8 cache",
    )
    if arguments.json is not None:
        for one in found:
            for metric, value in (
                ("error of storing", one.stored),
                ("error of 16 bits", one.wide),
                ("error of float8", one.float8),
            ):
                rows.append(Row(metric=metric, case=one.case, value=value, unit="relative norm"))
        settings = {"heads": HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
        write(arguments.json, report("float8-prefill", torch.cuda.get_device_name(), rows, settings))


if __name__ == "__main__":
    main()
