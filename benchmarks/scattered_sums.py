"""Large sums of several ranks, by NCCL and by parts of rows next to computation (SumScatter): microseconds.

    python benchmarks/scattered_sums.py [--ranks 4] [--size 4096] [--rows 8192 2048] [--json FILE]

On as many GPUs as ranks, one process each, bfloat16. "sum": an all-reduce and the norm behind it. "chunk": one chunk
alone: addends to their owners, norm, norms to all. "pair": both chunks. "copies": the copies to the owners alone.
"layer": the four GEMMs and two sums of a layer of Llama-3.1-8B, without attention and activation; "no sums" has neither
sums nor norms. CALLS calls follow one another, launched one by one ("eager") or as a CUDA graph; medians on rank 0.
First, results are compared bit by bit with sums in the order of the ranks in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from rank_processes import add_rank_options, is_rank, rows_of_first_rank

from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.distributed import RankGroup, Rendezvous, join
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize

CALLS = 8
REPLAYS = 9
EPS = 1e-5
DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn

Step = Callable[[], None]


class Sums:
    """The ways to sum."""

    def __init__(self, group: RankGroup, scatter: Any, rows: int, quantizes: bool) -> None:
        device = scatter._memory.device
        self.group = group
        self.scatter = scatter
        self.quantizes = quantizes
        first = -(-rows // 256) * 128  # also of fewer rows than are split
        self.sizes = [first, rows - first]
        self.weight = torch.ones(scatter.size, dtype=DTYPE, device=device)
        self.addend = torch.randn(rows, scatter.size, device=device).to(DTYPE)
        self.residual = torch.randn(rows, scatter.size, device=device).to(DTYPE)

    def norm(self, chunk: Any, number: int) -> None:
        """Norm this rank's rows of a chunk and send them."""
        begin = sum(self.sizes[:number])
        own = self.residual[begin + chunk.begin : begin + chunk.end]
        with chunk.norm_stream():
            first, *others = chunk.receive().receive()
            if self.quantizes:
                *made, _ = add_rms_norm_quantize(first, own, self.weight, EPS, FP8, others=others)
            else:
                made = [add_rms_norm(first, own, self.weight, EPS, others)[0]]
            chunk.gather(made)

    def chunk(self) -> None:
        one = self.scatter.start(self.addend[: self.sizes[0]])
        self.norm(one, 0)
        one.finish()

    def pair(self) -> None:
        chunks: list[Any] = [self.scatter.start(one) for one in self.addend.split(self.sizes)]
        for number, chunk in enumerate(chunks):
            self.norm(chunk, number)
        for chunk in chunks:
            chunk.finish()

    def whole(self) -> None:
        total = self.group.all_reduce(self.addend)
        if self.quantizes:
            add_rms_norm_quantize(total, self.residual, self.weight, EPS, FP8)
        else:
            add_rms_norm(total, self.residual, self.weight, EPS)

    def copies(self) -> None:
        """The copies of a chunk's addend alone."""
        scatter = self.scatter
        part = self.sizes[0] // self.group.ranks * scatter.size * 2
        event, ended = scatter._ready[0], scatter._normed[0]
        stream = torch.cuda.current_stream().cuda_stream
        scatter._check(scatter._driver.record(event, stream))
        copies = scatter._copies
        scatter._check(scatter._driver.wait_event(copies, event, 0))
        for other in scatter._others:
            target = scatter._addresses[other] + scatter._addend_at(0, other, self.group.rank)
            scatter._check(scatter._driver.copy(target, self.addend.data_ptr(), part, copies))
        scatter._check(scatter._driver.record(ended, copies) or scatter._driver.wait_event(stream, ended, 0))


class Layer:
    """The GEMMs of a layer, with sums behind two of them."""

    def __init__(self, sums: Sums) -> None:
        device, size, ranks = sums.addend.device, sums.scatter.size, sums.group.ranks
        self.sums = sums
        inner = 14336 // ranks

        def weight(inputs: int, outputs: int) -> torch.Tensor:
            return (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(DTYPE).t()

        self.output, self.down = weight(size // ranks, size), weight(inner, size)
        self.qkv, self.gate_up = weight(size, 6144 // ranks), weight(size, 2 * inner)
        self.attended = torch.randn(len(sums.addend), size // ranks, device=device).to(DTYPE)
        self.inner = inner

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.gate_up)[:, : self.inner] @ self.down

    def without(self) -> None:
        torch.mm(self.mlp(self.attended @ self.output), self.qkv)

    def whole(self) -> None:
        sums = self.sums
        hidden = sums.group.all_reduce(self.attended @ self.output)
        normed, residual = add_rms_norm(hidden, sums.residual, sums.weight, EPS)
        hidden = sums.group.all_reduce(self.mlp(normed))
        normed, residual = add_rms_norm(hidden, residual, sums.weight, EPS)
        torch.mm(normed, self.qkv)

    def parts(self) -> None:
        sums = self.sums
        scatter: Any = sums.scatter
        chunks = [scatter.start(x @ self.output) for x in self.attended.split(sums.sizes)]
        for number, chunk in enumerate(chunks):
            sums.norm(chunk, number)
        chunks = [scatter.start(self.mlp(chunk.finish()[0])) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            sums.norm(chunk, number)
        torch.cat([chunk.finish()[0] @ self.qkv for chunk in chunks])


def check(sums: Sums) -> None:
    """Compare results of many calls, in step and not, launched and replayed. Ends the process if one is wrong."""
    group, scatter = sums.group, sums.scatter
    generator = torch.Generator(sums.addend.device).manual_seed(group.rank)
    count = len(sums.sizes)
    made = [torch.empty_like(one) for one in sums.addend.split(sums.sizes)] * 2
    made = [one.clone() for one in made]
    given = [one.clone() for one in made]

    def step() -> None:
        """Two sums in the order of a layer."""
        chunks: list[Any] = [scatter.start(one) for one in given[:count]]
        for number in range(2 * count):
            if number % count == 0:
                for chunk in chunks[number:]:
                    with chunk.norm_stream():
                        chunk.gather([chunk.receive().reduce()])
            made[number].copy_(chunks[number].finish()[0])
            if number < count:
                chunks.append(scatter.start(given[count + number]))

    def verify(what: str) -> None:
        for number, (one, addend) in enumerate(zip(made, given, strict=True)):
            every = group.all_gather(addend)
            total = every[0].float()
            for other in every[1:]:
                total = total + other
            right = torch.equal(one, total.to(DTYPE))
            if not group.minimum(int(right)):
                sys.exit(f"error: rank {group.rank}, {what}, sum {number}: right here: {right}")

    graph = captured(step)
    for call in range(24):
        for one in given:
            one.copy_(torch.randn(one.shape, generator=generator, device=one.device))
        for one in made:
            one.zero_()
        torch.cuda.synchronize()
        if call % 3 == group.rank % 3:
            torch.cuda._sleep(400_000 * (1 + call % 2))
        if call % 2:
            graph.replay()
        else:
            step()
        verify(f"call {call}")


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """A graph of a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def timed(group: RankGroup, step: Step, graph: bool) -> float:
    """Microseconds per call."""

    def calls() -> None:
        for _ in range(CALLS):
            step()

    run = captured(calls).replay if graph else calls
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.minimum(0)
        torch.cuda._sleep(12_000_000)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


@torch.inference_mode()
def measure_rank(arguments: argparse.Namespace) -> list[Row]:
    """This rank's times."""
    rank, ranks = arguments.rank
    group: Any = join(
        Rendezvous(rank=rank, ranks=ranks, place=arguments.meet, timeout=60.0), find_device(f"cuda:{rank}")
    )
    rows: list[Row] = []
    group.open_overlapped_sums(max(arguments.rows), arguments.size, DTYPE)
    scatter = group.overlapped_sums
    assert scatter is not None, "these GPUs do not share memory"

    def add(case: str, step: Step) -> None:
        for graph in (False, True):
            value = timed(group, step, graph)
            rows.append(Row(metric="graph" if graph else "eager", case=case, value=value, unit="us"))
            if rank == 0:
                print(f"{case:<50} {'graph' if graph else 'eager'} {value:8.1f} us", flush=True)

    for count in arguments.rows:
        check(Sums(group, scatter, count, False))
        if rank == 0:
            print(f"right: {ranks} ranks, {count} rows", flush=True)
        for quantizes in (False, True):
            sums = Sums(group, scatter, count, quantizes)
            what = f"{count} rows, {'fp8' if quantizes else 'bf16'}"
            add(f"{what}, sum, NCCL", sums.whole)
            if not quantizes:
                add(f"{what}, copies", sums.copies)
            add(f"{what}, chunk", sums.chunk)
            add(f"{what}, pair", sums.pair)
        layer = Layer(Sums(group, scatter, count, False))
        add(f"{count} rows, layer, no sums", layer.without)
        add(f"{count} rows, layer, NCCL", layer.whole)
        add(f"{count} rows, layer, by parts", layer.parts)
    torch.cuda.synchronize()
    group.close()
    return rows


def main() -> None:
    """Run the ranks and write rank 0's times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 2048])
    add_rank_options(parser)
    arguments = parser.parse_args()
    if is_rank(arguments, measure_rank):
        return
    options = ["--size", str(arguments.size), "--rows", *map(str, arguments.rows)]
    rows = rows_of_first_rank(__file__, arguments.ranks, options)
    if arguments.json is not None:
        write(arguments.json, report("scattered-sums", torch.cuda.get_device_name(), rows, {"ranks": arguments.ranks}))


if __name__ == "__main__":
    main()
