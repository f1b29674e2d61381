"""Measure sampling on a GPU: us per batch, replayed from a CUDA graph, and by plain PyTorch operations to compare.

    python benchmarks/sampling.py [--rows 1 32 256] [--vocab 128256 151936] [--spread 2] [--plain] [--json FILE]

Logits are bfloat16 and normally distributed with the standard deviation `spread`. With 2, at temperature 1, top_p 0.9
keeps about a quarter of the vocabulary, which is the hard case: a language model's own distribution keeps a few hundred
tokens. The plain operations are timed by events around one call, after a warm-up; the floor is one read of the logits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.cli.bench.report import Row, report, write
from engine.core.sampling import Sampler
from engine.core.types import NewSequence, SamplingParams

WORKLOADS = {
    "greedy": [{"temperature": 0.0}],
    "no cutoff": [{}],
    "min_p": [{"min_p": 0.05}],
    "top_p": [{"top_p": 0.9}],
    "top_k": [{"top_k": 50}],
    "top_k, top_p": [{"top_k": 50, "top_p": 0.9}],
    "mixed": [{"temperature": 0.0}, {}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01}],
}
CALLS = 20
"""Calls in one graph."""
REPEATS = 7


def make_sampler(rows: int, vocab: int, asked: list[dict[str, float]], *, fused: bool) -> Sampler:
    sampler = Sampler(vocab, "cuda", frozenset(), max_running=rows, fused=fused)
    for row in range(rows):
        params = SamplingParams(seed=row, **asked[row % len(asked)])
        sampler.add(NewSequence(sequence=row, tokens=(0,), prompt_len=1, params=params), row)
    sampler.flush()
    return sampler


def elapsed(work: Callable[[], object], calls: int) -> float:
    """Median us per call; work: makes `calls` calls."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def fused_time(logits: torch.Tensor, asked: list[dict[str, float]]) -> float:
    rows = torch.arange(len(logits), device="cuda")
    sampler = make_sampler(*logits.shape, asked, fused=True)

    def greedy(logits: torch.Tensor, rows: torch.Tensor) -> None:
        sampler.greedy_path.choose(logits, None)
        sampler.table.advance(rows)

    draws = sampler.sampling_path(range(len(logits))).name == "draw"
    call = sampler.draw_path.draw_unprocessed if draws else greedy
    call(logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call(logits, rows)
    return elapsed(graph.replay, CALLS)


def plain_time(logits: torch.Tensor, asked: list[dict[str, float]]) -> float:
    rows, sequences = torch.arange(len(logits), device="cuda"), tuple(range(len(logits)))
    sampler = make_sampler(*logits.shape, asked, fused=False)
    return elapsed(lambda: sampler.sample(logits, sequences, rows), 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--spread", type=float, default=2.0)
    parser.add_argument("--bandwidth", type=float, default=4.28e12, help="bytes per second, for the floor")
    parser.add_argument("--plain", action="store_true", help="time the plain operations too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = torch.cuda.get_device_name()
    table = Table("", "rows", "vocab", "us", "plain us", "floor us", title=f"Sampling, bfloat16 logits, {machine}")
    measured = []
    for vocab in options.vocab:
        for rows in options.rows:
            logits = (torch.randn(rows, vocab, device="cuda") * options.spread).bfloat16()
            floor = logits.nbytes / options.bandwidth * 1e6
            for name, asked in WORKLOADS.items():
                fused = fused_time(logits, asked)
                plain = plain_time(logits, asked) if options.plain else None
                shown = "" if plain is None else f"{plain:.0f}"
                table.add_row(name, str(rows), str(vocab), f"{fused:.1f}", shown, f"{floor:.1f}")
                measured.append(
                    Row(
                        metric=f"{name}, {rows} x {vocab}",
                        value=round(fused, 1),
                        unit="us",
                        baseline=None if plain is None else round(plain, 1),
                        baseline_name=None if plain is None else "plain operations",
                    )
                )
    Console().print(table)
    if options.json:
        write(options.json, report("sampling", machine, measured, {"spread": options.spread, "dtype": "bfloat16"}))


if __name__ == "__main__":
    main()
