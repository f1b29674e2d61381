"""Decode attention and the linear layers of a prompt on one GPU at a time, one after the other and side by side.

    python benchmarks/overlap.py [--batch 1280 --context 1500 --rows 2048] [--json FILE]

Attention waits for memory and linear layers wait for tensor cores, so that the two together could take as long as the
longer one. Two streams run a chain of attention calls (a float8 cache, 32 / 8 heads of 128) and a chain of float8 GEMMs
(the four linear layers of Llama-3.1-8B), each a CUDA graph of about the same duration. Three ways to share the device:

- streams: both chains as the engine runs them, in two streams.
- shared: attention with fewer programs per multiprocessor next to a GEMM kernel whose tiles leave registers and shared
  memory for these programs, so that both can be on every multiprocessor.
- split: each chain in a green context (CUDA 12.4), which has some of the multiprocessors for itself.

gain: the time of both chains one after the other, each as fast as it can be alone, over the time of both together. At
most 2; below 1 the device is better used for one at a time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from attention import Bench, Shape
from attrs import evolve, frozen
from tuned_attention import tuned_decode
from w8a8_kernels import Product

from engine.cli.bench.report import Row, report, write
from engine.cli.tables import print_table
from engine.ops.attention.paged_decode_config import DecodeConfig, decode_configs
from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.ops.gemm.skinny_launch import Workspace

HEADS = (32, 8)
HEAD_DIM = 128
KV_DTYPE = "float8_e4m3fn"
CHAIN_MS = 8.0
"""Duration of each chain when it runs alone."""
ROUNDS = 7
PROGRAMS = (2, 4, 8)
"""Attention programs per multiprocessor; the engine runs 8."""
TILES = (
    W8A8Tile(rows=128, outputs=128, warps=8, stages=4, persistent=True),
    W8A8Tile(rows=128, outputs=128, warps=4, stages=4, persistent=True),
    W8A8Tile(rows=128, outputs=256, warps=8, stages=3, persistent=True),
)
"""What leaves room for attention: a tile takes (rows + outputs) * stages / 8 KiB, and rows * outputs registers."""
ATTENTION_SMS = (32, 48, 64, 80, 96)
"""Multiprocessors that attention has for itself in a split."""

Launch = Callable[[], object]


@frozen
class Chain:
    """A CUDA graph of kernels, and the stream to replay it in."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    calls: int

    @classmethod
    def capture(cls, calls: Sequence[Launch], stream: torch.cuda.Stream) -> Chain:
        """Capture calls in a stream. Each is run before, to compile its kernels."""
        with torch.cuda.stream(stream):
            for call in dict.fromkeys(calls):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return cls(graph, stream, len(calls))


def together(chains: Sequence[Chain]) -> tuple[float, list[float]]:
    """Milliseconds until all chains have ended that start together, and until each has: medians."""
    main = torch.cuda.current_stream()
    times = []
    for _ in range(ROUNDS + 2):
        begin = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in chains]
        begin.record(main)
        for chain, end in zip(chains, ends, strict=True):
            chain.stream.wait_event(begin)
            with torch.cuda.stream(chain.stream):
                chain.graph.replay()
            end.record(chain.stream)
            main.wait_event(end)
        torch.cuda.synchronize()
        times.append([begin.elapsed_time(end) for end in ends])
    each = [statistics.median(column) for column in zip(*times[2:], strict=True)]
    return statistics.median(max(row) for row in times[2:]), each


def alone(chain: Chain) -> float:
    """Milliseconds of a chain that has the device for itself."""
    return together([chain])[0]


class Attention:
    """Decode attention over several layers, in turn, so that nothing stays in the GPU's cache."""

    def __init__(self, batch: int, context: int) -> None:
        shape = Shape(name=f"{batch}x{context}", heads=HEADS, contexts=(context,) * batch)
        self.bench = Bench.make(HEADS, [(context - 1, 1)] * batch, 4, KV_DTYPE)
        self.bytes = shape.layer_bytes(1)
        shared = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
        configs = decode_configs(HEAD_DIM, 1, shared, HEADS)
        self.config = next(config for limit, config in configs if batch <= limit)

    def calls(self, config: DecodeConfig, multiprocessors: int | None = None) -> list[Launch]:
        """One call per layer. multiprocessors: number of them that the programs fill; None: all."""
        programs = None
        if multiprocessors is not None:
            programs = multiprocessors * config.programs_per_sm * config.fold // HEADS[1]
        decode = tuned_decode(self.bench, config, programs)

        def call(layer: int) -> Launch:
            return lambda: decode(layer, self.bench.q)

        return [call(layer) for layer in range(self.bench.spec.num_layers)]


class Linears:
    """The float8 GEMMs of one layer of Llama-3.1-8B for `rows` tokens."""

    def __init__(self, rows: int) -> None:
        workspace = Workspace(torch.device("cuda", 0))
        shapes = list(models.LINEARS["llama-3.1-8b"].values())
        self.products = [Product.make("fp8", rows, *shape, workspace) for shape in shapes]
        self.flops = sum(2 * one.x.numel() * one.weights[0].shape[0] for one in self.products)

    def calls(self, tile: W8A8Tile | None) -> list[Launch]:
        """One call per GEMM. tile: of our persistent kernel; None: torch's kernel, as the engine runs."""

        def call(product: Product) -> Launch:
            if tile is not None:
                multiply = product.by_tile(tile)
                return lambda: multiply(product.weights[0])
            scales = product.x_scale[:, None], product.scale[None, :]
            return lambda: torch._scaled_mm(
                product.x, product.weights[0].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return [call(product) for product in self.products]


def split_streams(first: int) -> tuple[torch.cuda.ExternalStream, torch.cuda.ExternalStream, int, int]:
    """Streams of two green contexts, and their multiprocessors: at least `first`, and the rest. Never released."""
    from cuda.bindings import driver

    def check(answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"green context: {error}")
        return values[0] if len(values) == 1 else values

    device = check(driver.cuDeviceGet(0))
    whole = check(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, rest = check(driver.cuDevSmResourceSplitByCount(1, whole, 0, first))
    streams = []
    for resource in (groups[0], rest):
        description = check(driver.cuDevResourceGenerateDesc([resource], 1))
        context = check(
            driver.cuGreenCtxCreate(description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        )
        stream = check(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        streams.append(torch.cuda.ExternalStream(int(stream)))
    return streams[0], streams[1], groups[0].sm.smCount, rest.sm.smCount


def repeated(calls: Sequence[Launch]) -> list[Launch]:
    """Calls in turn, as often as CHAIN_MS takes."""
    once = alone(Chain.capture(calls, torch.cuda.Stream()))
    return list(calls) * max(1, round(CHAIN_MS / once))


@frozen(kw_only=True)
class Result:
    """One way to share the device."""

    way: str
    case: str
    attention: float
    """Milliseconds of the attention chain alone, with this way's kernels."""
    linears: float
    both: float
    """Milliseconds of both together."""
    gain: float


def measure(batch: int, context: int, rows: int) -> Iterator[Result]:
    """Time all ways."""
    attention, linears = Attention(batch, context), Linears(rows)
    own = repeated(attention.calls(attention.config))
    torchs = repeated(linears.calls(None))
    layers, products = len(own), len(torchs)
    best_attention = alone(Chain.capture(own, torch.cuda.Stream()))
    best_linears = alone(Chain.capture(torchs, torch.cuda.Stream()))
    bandwidth = layers * attention.bytes / best_attention / 1e9
    rate = products / len(linears.products) * linears.flops / best_linears / 1e9
    print(f"alone: attention {bandwidth:.2f} TB/s, linear layers {rate:.0f} TFLOP/s", flush=True)

    def result(way: str, case: str, first: Chain, second: Chain) -> Result:
        both, each = together([first, second])
        made = Result(
            way=way,
            case=case,
            attention=alone(first),
            linears=alone(second),
            both=both,
            gain=(best_attention + best_linears) / both,
        )
        ended = ", ".join(f"{end:.2f}" for end in each)
        print(
            f"{way:<8}{case:<48} alone {made.attention:6.2f} {made.linears:6.2f} ms, both {both:6.2f} (ended {ended}),"
            f" gain {made.gain:.2f}",
            flush=True,
        )
        return made

    def chains(
        config: DecodeConfig,
        tile: W8A8Tile | None,
        streams: Sequence[torch.cuda.Stream],
        multiprocessors: int | None = None,
    ) -> list[Chain]:
        calls = attention.calls(config, multiprocessors)
        multiply = linears.calls(tile)
        return [
            Chain.capture([calls[number % len(calls)] for number in range(layers)], streams[0]),
            Chain.capture([multiply[number % len(multiply)] for number in range(products)], streams[1]),
        ]

    for programs in PROGRAMS:
        config = evolve(attention.config, programs_per_sm=programs)
        yield result(
            "streams",
            f"{programs} programs, torch's kernel",
            *chains(config, None, [torch.cuda.Stream(), torch.cuda.Stream()]),
        )
    for programs in PROGRAMS:
        for tile in TILES:
            config = evolve(attention.config, programs_per_sm=programs)
            for high in (0, -1):  # priority of attention's stream
                streams = [torch.cuda.Stream(priority=high), torch.cuda.Stream(priority=0)]
                name = f"{programs} programs{', first' if high else ''}, {tile}"
                yield result("shared", name, *chains(config, tile, streams))
    for wanted in ATTENTION_SMS:
        *streams, mine, others = split_streams(wanted)
        total = torch.cuda.get_device_properties(0).multi_processor_count
        torch._C._set_sm_carveout_experimental(total - others)
        try:
            pair = chains(attention.config, None, streams, mine)
            yield result("split", f"{mine} / {others} multiprocessors, torch's kernel", *pair)
        finally:
            torch._C._set_sm_carveout_experimental(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1280, help="decoding sequences")
    parser.add_argument("--context", type=int, default=1500, help="tokens of each")
    parser.add_argument("--rows", type=int, default=2048, help="rows of the linear layers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: list[Result] = []
    with torch.inference_mode():
        for result in measure(arguments.batch, arguments.context, arguments.rows):
            results.append(result)
            if arguments.json is not None:
                rows = [
                    Row(metric=metric, case=f"{one.way}: {one.case}", value=value, unit=unit)
                    for one in results
                    for metric, value, unit in (
                        ("attention alone", one.attention, "ms"),
                        ("linear layers alone", one.linears, "ms"),
                        ("both together", one.both, "ms"),
                        ("gain", one.gain, "x"),
                    )
                ]
                settings = {name: getattr(arguments, name) for name in ("batch", "context", "rows")}
                write(arguments.json, report("overlap", torch.cuda.get_device_name(), rows, settings))
    print_table(
        ("way", "case", "attention", "linears", "both", "gain"),
        [
            (one.way, one.case, f"{one.attention:.2f}", f"{one.linears:.2f}", f"{one.both:.2f}", f"{one.gain:.2f}")
            for one in sorted(results, key=lambda one: -one.gain)[:12]
        ],
        title="ms; the best first",
    )


if __name__ == "__main__":
    main()
