"""An all-reduce with the residual addition and norm that follow it: microseconds, by ranks and rows.

    python benchmarks/all_reduce.py [--ranks 2 4] [--size 4096] [--rows 1 64 256] [--json FILE]

On as many GPUs as ranks, one process each, bfloat16. Three ways: the norm's kernel in one shot, the same in two shots
(engine.ops.norm.all_reduce_rms_norm), and an all-reduce by the group (torch's kernels on symmetric memory up to 4 MiB,
then NCCL) with a norm behind it. CALLS calls follow one another in a CUDA graph; medians of several replays on rank 0.
Every result is compared with the sum and norm in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from rank_processes import add_rank_options, is_rank, rows_of_first_rank

from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.distributed import RankGroup, Rendezvous, join
from engine.ops.norm.all_reduce_rms_norm import all_reduce_rms_norm
from engine.ops.norm.rms_norm import add_rms_norm

CALLS = 64
"""All-reduces per replay: about those of one step of a model with 32 layers."""
REPLAYS = 15
EPS = 1e-5
TOLERANCE = 1e-2
DTYPE = torch.bfloat16

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def ways_of(group: RankGroup, size: int) -> dict[str, tuple[int, Way]]:
    """Name -> the largest number of rows, and the function of x, residual and weight."""

    def separate(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(group.all_reduce(x), residual, weight, EPS)

    ways: dict[str, tuple[int, Way]] = {"separate": (1 << 30, separate)}
    buffers = group.reduce_buffers(size, DTYPE)
    if buffers is not None:
        one = attrs.evolve(buffers, one_shot_rows=buffers.max_rows)
        two = attrs.evolve(buffers, one_shot_rows=0)
        ways["one shot"] = (
            buffers.max_rows,
            lambda x, residual, weight: all_reduce_rms_norm(x, residual, weight, EPS, one),
        )
        ways["two shots"] = (
            buffers.max_rows,
            lambda x, residual, weight: all_reduce_rms_norm(x, residual, weight, EPS, two),
        )
    return ways


def check(way: Way, group: RankGroup, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise SystemExit on all ranks if one has a wrong result, or the ranks' results differ."""
    total = group.all_gather(x).float().sum(0) + residual.float()
    normed, summed = way(x.clone(), residual.clone(), weight)
    expected = F.rms_norm(total, weight.shape, weight.float(), EPS), total
    pairs = zip((normed, summed), expected, strict=True)
    error = max(float((found.float() - right).norm() / right.norm()) for found, right in pairs)
    everywhere = group.all_gather(torch.stack((normed, summed)))
    equal = all(torch.equal(one, everywhere[0]) for one in everywhere)
    if not group.minimum(int(equal and error < TOLERANCE)):
        sys.exit(f"error: {len(x)} rows, rank {group.rank}: relative error {error:.4f}; ranks equal: {equal}")


def measure(way: Way, group: RankGroup, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> float:
    """Microseconds per call. Changes x and residual: an all-reduce in place multiplies x by the ranks in each call."""
    x.normal_(std=1e-3)

    def calls() -> None:
        for _ in range(CALLS):
            way(x, residual, weight)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        found = []
        for _ in range(REPLAYS):
            x.normal_(std=1e-3)
            group.minimum(0)
            group.all_reduce(torch.zeros(1, device=x.device))  # the ranks start together
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / CALLS)
        group.minimum(0)
    return statistics.median(found)


def measure_rank(arguments: argparse.Namespace) -> list[Row]:
    """The times on this rank."""
    rank, ranks = arguments.rank
    device = find_device(f"cuda:{rank}")
    torch.cuda.set_device(rank)
    group = join(Rendezvous(rank=rank, ranks=ranks, place=arguments.meet), device)
    torch.manual_seed(rank)
    rows_found = []
    ways = ways_of(group, arguments.size)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(arguments.size, device="cuda", generator=generator).to(DTYPE)
    for rows in arguments.rows:
        x = torch.randn(rows, arguments.size, device="cuda").to(DTYPE)
        residual = torch.randn(rows, arguments.size, device="cuda", generator=generator).to(DTYPE)
        for name, (most, way) in ways.items():
            if rows <= most:
                check(way, group, x, residual, weight)
                spent = measure(way, group, x.clone(), residual.clone(), weight)
                rows_found.append(Row(metric=name, case=f"{ranks} x, {rows} rows", value=spent, unit="us"))
    group.close()
    return rows_found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=4096, help="numbers per row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512, 1024])
    add_rank_options(parser)
    arguments = parser.parse_args()
    if is_rank(arguments, measure_rank):
        return
    options = ["--size", str(arguments.size), "--rows", *map(str, arguments.rows)]
    rows = [row for ranks in arguments.ranks for row in rows_of_first_rank(__file__, ranks, options)]
    for case in dict.fromkeys(row.case for row in rows):
        spent = "  ".join(f"{row.metric} {row.value:6.2f}" for row in rows if row.case == case)
        print(f"{case:<20}{spent}")
    if arguments.json is not None:
        settings = {"size": arguments.size, "dtype": "bfloat16"}
        write(arguments.json, report("all_reduce", torch.cuda.get_device_name(), rows, settings))


if __name__ == "__main__":
    main()
