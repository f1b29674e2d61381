"""Decode attention by the order of its contexts, and by what the start of a sequence counts among the tiles of a range.

    python benchmarks/decode_starts.py [--kinds decode-float8] [--orders ascending] [--json FILE]

A batch often has its contexts in the order of their ages, since requests that arrive together end together. Each
batch is replayed from CUDA graphs over cold keys and values by the launch that the engine chooses, with 0 to
MAX_START_TILES tiles per start (DecodeConfig.start_tiles) in turn; the medians of ROUNDS turns count.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen
from sweep_attention import Attention
from sweep_cases import AttentionCase, Heads
from sweep_timing import make_timer

from engine.cli.bench.report import Row, report, write

MAX_START_TILES = 3
ROUNDS = 3
ORDERS = ("random", "ascending", "descending")
LARGE = Heads(heads=32, kv_heads=8, head_dim=128)
SMALL = Heads(heads=16, kv_heads=8, head_dim=128)
NARROW = Heads(heads=32, kv_heads=8, head_dim=64)
FEW = (Heads(heads=16, kv_heads=4, head_dim=128), Heads(heads=16, kv_heads=4, head_dim=64))


@frozen
class Batch:
    """Sequences whose contexts are spread evenly between two lengths."""

    heads: Heads
    count: int
    shortest: int
    longest: int

    def lengths(self, order: str) -> tuple[int, ...]:
        """The contexts in one of ORDERS."""
        found = np.linspace(self.shortest, self.longest, self.count).astype(int)
        if order == "random":
            found = np.random.default_rng(0).permutation(found)
        return tuple(int(length) for length in (found[::-1] if order == "descending" else found))


def batches(kind: str) -> Iterator[Batch]:
    """The batches of a kind of cache, few sequences first."""
    for heads in (LARGE, SMALL, NARROW) if kind == "decode" else (LARGE, *FEW):
        for count, shortest, longest in ((10, 100, 2000), (24, 100, 4000), (40, 100, 3000)):
            yield Batch(heads, count, shortest, longest)
    for heads in (LARGE, SMALL) if kind == "decode" else (LARGE,):
        for count, shortest, longest in ((64, 100, 2048), (128, 100, 2048), (256, 100, 1124), (256, 512, 768)):
            yield Batch(heads, count, shortest, longest)
    if kind == "decode-float8":  # the steady state of ten_loads.py
        for count, shortest, longest in ((838, 128, 4224), (1577, 128, 2176), (1214, 1000, 2000), (594, 2048, 4096)):
            yield Batch(LARGE, count, shortest, longest)


def measure(kind: str, batch: Batch, order: str, device: torch.device) -> Iterator[Row]:
    """Microseconds per layer, one row for each number of tiles per start; the baseline is that of none."""
    case = AttentionCase(kind=kind, shape=batch.heads, lengths=batch.lengths(order))
    made, timer = Attention.make(case, device, "bfloat16"), make_timer(device)
    chosen = made.chosen()
    ways = {tiles: made.calls_by(evolve(chosen, start_tiles=tiles)) for tiles in range(MAX_START_TILES + 1)}
    taken: dict[int, list[float]] = {tiles: [] for tiles in ways}
    for calls in ways.values():
        calls[0]()
    for _ in range(ROUNDS):
        for tiles, calls in ways.items():
            taken[tiles].append(timer.per_call(calls) * 1e6)
    found = {tiles: statistics.median(times) for tiles, times in taken.items()}
    name = f"{kind} {batch.heads}, {batch.count} x {batch.shortest} to {batch.longest}, {order}"
    print(f"{name:<60}" + " ".join(f"{value:7.1f}" for value in found.values()), f"chosen: {chosen}", flush=True)
    for tiles, value in found.items():
        metric = f"attention, {tiles} tiles per start" + (", chosen" if tiles == chosen.start_tiles else "")
        yield Row(metric=metric, value=value, unit="us", baseline=found[0], baseline_name="0 tiles", case=name)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("decode-float8", "decode")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="decode: a cache in bfloat16")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--json", type=Path, help="file to write the results to, after each batch")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    machine, rows = f"cuda:0 ({torch.cuda.get_device_name(device)})", []
    for kind in options.kinds:
        for batch in batches(kind):
            for order in options.orders:
                rows += measure(kind, batch, order, device)
                torch.cuda.empty_cache()
            if options.json is not None:
                write(options.json, report("decode_starts", machine, rows, {"rounds": ROUNDS}))


if __name__ == "__main__":
    main()
