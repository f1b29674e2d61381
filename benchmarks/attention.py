"""Attention backends alone on a GPU: microseconds per layer of decode, TFLOP/s of prefill.

    python benchmarks/attention.py triton torch [--only 256x640] [--kv-dtype float8_e4m3fn] [--in-layers] [--json FILE]
    python benchmarks/attention.py --tune [--only 256x640]

Decodes are replayed from CUDA graphs over enough layers that no layer's keys and values stay in the GPU's cache;
backends without graphs are launched one by one, as an engine does. The floor is the time to read the keys and values
once. Every result is compared with the definition of attention.

With --in-layers, each call is preceded by the projection of queries, keys and values and by their rotation, and is
followed by the output projection; the time of a graph without attention is subtracted. Calls in direct sequence hide a
part of what merging costs, because the next one starts meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attention_batch import attention_error, make_batch
from attrs import frozen
from tuned_attention import Decode, tuned_decode, tuned_prefill

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import find_device
from engine.core.plugin_host import load_plugins

BYTES_PER_SECOND = 4.28e12
"""Copy bandwidth of an H200."""
COLD_BYTES = 160 << 20
"""Three times the size of its L2 cache."""
BLOCK_SIZE, HEAD_DIM = 16, 128
HIDDEN = 1024
"""Inputs of the projections around attention."""
HEADS = ((32, 8), (16, 8))
TOLERANCE = 2e-2


@frozen(kw_only=True)
class Shape:
    """Decoding sequences, one query each."""

    name: str
    heads: tuple[int, int]
    contexts: tuple[int, ...]

    def layer_bytes(self, itemsize: int) -> int:
        return 2 * sum(self.contexts) * self.heads[1] * HEAD_DIM * itemsize


def shapes(only: Iterable[str] = ()) -> Iterator[Shape]:
    """The shapes of these names, which may be any like 32x190; by default a few."""
    pick = random.Random(0)
    ragged = tuple(pick.randint(100, 2048) for _ in range(256))
    sizes = [(1, 512), (8, 512), (32, 512), (64, 1024), (256, 256), (256, 640), (64, 4096)]
    if only:
        sizes = [(int(batch), int(context)) for batch, context in (name.split("x") for name in only if "U" not in name)]
    for heads in HEADS:
        for batch, context in sizes:
            yield Shape(name=f"{batch}x{context}", heads=heads, contexts=(context,) * batch)
        if not only or "256xU(100,2048)" in only:
            yield Shape(name="256xU(100,2048)", heads=heads, contexts=ragged)


@frozen
class Bench:
    """Random keys and values of several layers, and a batch over these."""

    spec: AttentionSpec
    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor

    @classmethod
    def make(cls, heads: tuple[int, int], lengths: Iterable[tuple[int, int]], layers: int, kv_dtype: str) -> Bench:
        """lengths: (cached, new) per sequence; sequences with one new token decode."""
        news = np.array([new for _, new in lengths], np.int32)
        contexts = np.array([cached + new for cached, new in lengths], np.int32)
        batch, num_blocks = make_batch(contexts, news, int((news == 1).sum()), BLOCK_SIZE, "cuda")
        spec = AttentionSpec(
            num_layers=layers,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            max_len=int(contexts.max()),
            sliding_windows=(None,) * layers,
        )
        pool = KVPool(spec, num_blocks, "cuda")
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device="cuda"))
        packed = torch.randn(int(news.sum()), heads[0] + 2 * heads[1], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        return cls(spec, pool, batch, packed[:, : heads[0]])

    @classmethod
    def decode(cls, shape: Shape, kv_dtype: str) -> Bench:
        layer = shape.layer_bytes(getattr(torch, kv_dtype).itemsize)
        layers = max(4, min(96, -(-COLD_BYTES // layer)))
        return cls.make(shape.heads, [(context - 1, 1) for context in shape.contexts], layers, kv_dtype)

    def backend(self, cls: type[AttentionBackend[Any, Any]]) -> AttentionBackend[Any, Any]:
        refusal = cls.refuses(self.spec, find_device("cuda"))
        if refusal:
            raise SystemExit(f"{cls.__name__} refuses: {refusal}")
        return cls(self.spec, self.pool, cls.options_class() if cls.options_class else None)


class Projections:
    """The kernels that a layer launches around attention, each layer with weights of its own."""

    def __init__(self, bench: Bench) -> None:
        from engine.ops.attention.rope_and_cache import angles

        spec, batch = bench.spec, bench.batch
        self._bench = bench
        self._x = torch.randn(batch.num_sequences, HIDDEN, dtype=torch.bfloat16, device="cuda")
        width = (spec.num_heads + 2 * spec.num_kv_heads) * HEAD_DIM
        sizes = [(HIDDEN, width), (spec.num_heads * HEAD_DIM, HIDDEN)]
        self._weights = [
            [torch.randn(size, dtype=torch.bfloat16, device="cuda") * size[0] ** -0.5 for size in sizes]
            for _ in range(spec.num_layers)
        ]
        last = batch.context_lens.long() - 1
        blocks = batch.block_tables.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
        self._slots = blocks * BLOCK_SIZE + last % BLOCK_SIZE
        self._angles = angles(last, torch.ones(HEAD_DIM // 2, device="cuda"), 1.0)

    def run(self, layer: int, decode: Decode | None) -> None:
        """Run a layer, or all of it but attention."""
        from engine.ops.attention.rope_and_cache import rotate_and_write

        spec, pool = self._bench.spec, self._bench.pool
        project, project_output = self._weights[layer]
        qkv = self._x @ project
        rotate_and_write(qkv, pool.keys[layer], pool.values[layer], self._slots, *self._angles, spec.num_heads)
        q = qkv.view(len(qkv), -1, HEAD_DIM)[:, : spec.num_heads]
        out = q if decode is None else decode(layer, q)
        out.reshape(len(qkv), -1) @ project_output


def microseconds(work: Callable[[], Any], rounds: int = 15) -> float:
    """Return the median time of `work`."""
    for _ in range(3):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in marks)


def time_layers(bench: Bench, decode: Decode, captured: bool = True) -> tuple[float, float]:
    """Return microseconds per layer, and the error."""
    layers = range(bench.spec.num_layers)
    error = attention_error(bench, decode(0, bench.q))
    if not captured:
        return microseconds(lambda: [decode(layer, bench.q) for layer in layers]) / len(layers), error
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [decode(layer, bench.q) for layer in layers]
    spent = microseconds(graph.replay) / len(layers)
    return spent, max(error, attention_error(bench, outs[0]))


def time_in_layers(bench: Bench, decode: Decode) -> tuple[float, float]:
    """As `time_layers`, between the kernels of a layer, whose time is subtracted."""
    error = attention_error(bench, decode(0, bench.q))
    projections = Projections(bench)
    spent = []
    for call in (decode, None):
        projections.run(0, call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(bench.spec.num_layers):
                projections.run(layer, call)
        spent.append(microseconds(graph.replay) / bench.spec.num_layers)
    return spent[0] - spent[1], error


def decode_of(bench: Bench, cls: type[AttentionBackend[Any, Any]]) -> tuple[Decode, bool]:
    backend = bench.backend(cls)
    captured = cls.graphs in ("decode", "any")
    plan = backend.plan(bench.batch, GraphSlot(num_sequences=bench.batch.num_sequences) if captured else None)
    none = bench.q[:, :0]
    return lambda layer, q: backend.forward(layer, q, none, none, plan), captured


def prefill_tflops(spent: float, heads: int, sequences: int, length: int) -> float:
    """TFLOP/s of causal attention: half of 4 * head_dim operations per head and pair of positions."""
    return 2 * HEAD_DIM * heads * sequences * length * length / spent / 1e6


def run_decodes(
    names: Iterable[str], chosen: Iterable[Shape], kv_dtype: str, *, in_layers: bool = False
) -> list[dict[str, Any]]:
    classes = {name: load_plugins().attention.get(name).load() for name in names}
    rows = []
    for shape in chosen:
        bench = Bench.decode(shape, kv_dtype)
        floor = shape.layer_bytes(getattr(torch, kv_dtype).itemsize) / BYTES_PER_SECOND * 1e6
        for name, cls in classes.items():
            decode, captured = decode_of(bench, cls)
            if in_layers and captured:
                spent, error = time_in_layers(bench, decode)
            else:
                spent, error = time_layers(bench, decode, captured)
            rows.append(
                {
                    "backend": name,
                    "heads": "/".join(map(str, shape.heads)),
                    "shape": shape.name,
                    "floor_us": round(floor, 1),
                    "us": round(spent, 2),
                    "of_bandwidth": round(floor / spent, 3),
                    "error": round(error, 5),
                }
            )
            show(rows[-1])
    return rows


def run_prefills(names: Iterable[str], kv_dtype: str, sequences: int, length: int) -> list[dict[str, Any]]:
    rows = []
    for heads, name in itertools.product(HEADS, names):
        bench = Bench.make(heads, [(0, length)] * sequences, 2, kv_dtype)
        cls = load_plugins().attention.get(name).load()
        backend = bench.backend(cls)
        plan = backend.plan(bench.batch)
        none = bench.q[:, :0]
        error = attention_error(bench, backend.forward(0, bench.q, none, none, plan))
        spent = microseconds(lambda b=backend, q=bench.q, n=none, p=plan: b.forward(1, q, n, n, p), 7)
        rows.append(
            {
                "backend": name,
                "heads": "/".join(map(str, heads)),
                "shape": f"prefill {sequences}x{length}",
                "us": round(spent, 1),
                "tflops": round(prefill_tflops(spent, heads[0], sequences, length), 1),
                "error": round(error, 5),
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    wrong = "   WRONG" if not row["error"] <= TOLERANCE else ""
    rest = "  ".join(f"{key} {value:>8}" for key, value in row.items() if key not in ("backend", "heads", "shape"))
    print(f"{row['backend']:<12}{row['heads']:<7}{row['shape']:<18}{rest}{wrong}", flush=True)


def decode_candidates(itemsize: int) -> list[Any]:
    from engine.ops.attention.paged_decode_config import DecodeConfig

    found = []
    for block_n, warps, stages, programs in itertools.product((32, 64, 128), (2, 4), (2, 3, 4), (1, 2, 3, 4)):
        flight = (stages - 1) * 2 * block_n * HEAD_DIM * itemsize * programs
        if flight >= 48 << 10 and flight + programs * 8192 <= 227 << 10 and block_n // warps <= 32:
            found.append(DecodeConfig(block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs))
    return found


def prefill_candidates() -> list[Any]:
    from engine.ops.attention.paged_prefill_config import PERSISTENT, PrefillConfig

    halved = attrs.evolve(PERSISTENT, block_n=64, num_stages=4)
    persistent = [PERSISTENT, halved, attrs.evolve(halved, across_tiles=True)]
    sizes = [(128, 64, 8), (128, 128, 8), (128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 128, 4), (64, 32, 4)]
    return persistent + [
        PrefillConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
        for (m, n, warps), stages in itertools.product(sizes, (2, 3))
        if (m + stages * 2 * n) * HEAD_DIM * 2 <= 224 << 10
    ]


def compile_one(task: tuple[tuple[int, int], int, Any, str]) -> None:
    """Launch a kernel once on a tiny batch, in a separate process, which puts it into Triton's cache on disk."""
    from engine.ops.attention.paged_prefill_config import PrefillConfig

    heads, sequences, config, kv_dtype = task
    prompt = isinstance(config, PrefillConfig)
    bench = Bench.make(heads, [(15, 17 if prompt else 1)] * sequences, 1, kv_dtype)
    (tuned_prefill if prompt else tuned_decode)(bench, config)(0, bench.q)
    torch.cuda.synchronize()


def precompile(tasks: list[tuple[tuple[int, int], int, Any, str]]) -> None:
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks, chunksize=4))


def tune(chosen: list[Shape], kv_dtype: str, sequences: int, length: int) -> list[dict[str, Any]]:
    decodes = decode_candidates(getattr(torch, kv_dtype).itemsize)
    prompts = prefill_candidates() if sequences else []
    classes = {(shape.heads, 1 if len(shape.contexts) <= 16 else 256) for shape in chosen}
    tasks = [(heads, count, config, kv_dtype) for heads, count in sorted(classes) for config in decodes]
    tasks += [(heads, 1, config, kv_dtype) for heads in HEADS for config in prompts]
    print(f"compiling {len(tasks)} kernels", flush=True)
    precompile(tasks)
    rows = []
    for shape in chosen:
        bench = Bench.decode(shape, kv_dtype)
        floor = shape.layer_bytes(getattr(torch, kv_dtype).itemsize) / BYTES_PER_SECOND * 1e6
        timed = []
        for config in decodes:
            spent, error = time_layers(bench, tuned_decode(bench, config))
            timed.append({"config": attrs.asdict(config), "us": round(spent, 2), "error": round(error, 5)})
        rows += best(shape.name, shape.heads, timed, floor)
    for heads in HEADS if prompts else ():
        bench = Bench.make(heads, [(0, length)] * sequences, 1, kv_dtype)
        timed = []
        for config in prompts:
            prefill = tuned_prefill(bench, config)
            error = attention_error(bench, prefill(0, bench.q))
            spent = microseconds(lambda run=prefill, q=bench.q: run(0, q), 5)
            timed.append({"config": attrs.asdict(config), "us": round(spent, 1), "error": round(error, 5)})
        rows += best(f"prefill {sequences}x{length}", heads, timed, 0.0)
    return rows


def best(name: str, heads: tuple[int, int], timed: list[dict[str, Any]], floor: float) -> list[dict[str, Any]]:
    """The three fastest, printed; wrong ones are printed too."""
    label = f"{'/'.join(map(str, heads)):<7}{name:<18}"
    for row in timed:
        if not row["error"] <= TOLERANCE:
            print(f"{label}WRONG by {row['error']}: {row['config']}", flush=True)
    right = sorted((row for row in timed if row["error"] <= TOLERANCE), key=lambda row: row["us"])[:3]
    for row in right:
        share = f"{floor / row['us']:6.1%}" if floor else ""
        settings = " ".join(f"{key} {value}" for key, value in row["config"].items())
        print(f"{label}{row['us']:>9.2f} us {share}  {settings}", flush=True)
    return [{"heads": heads, "shape": name, "floor_us": round(floor, 1), **row} for row in right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["triton"], help="attention plugins by name")
    parser.add_argument("--only", action="append", help="shapes to do, like 256x640; may be repeated")
    parser.add_argument("--in-layers", action="store_true", help="measure decode between the other kernels of a layer")
    parser.add_argument("--kv-dtype", default="bfloat16", help="type of keys and values")
    parser.add_argument("--prefill", default="16x2048", help="sequences x length, or 0x0 for none")
    parser.add_argument(
        "--tune", action="store_true", help="try launch parameters of the Triton kernels; the best 3 per shape"
    )
    parser.add_argument("--json", type=Path, help="write the results")
    options = parser.parse_args()

    torch.manual_seed(0)
    chosen = list(shapes(options.only or ()))
    sequences, length = map(int, options.prefill.split("x"))
    with torch.inference_mode():
        if options.tune:
            rows = tune(chosen, options.kv_dtype, sequences, length)
        else:
            rows = run_decodes(options.backends, chosen, options.kv_dtype, in_layers=options.in_layers)
            if sequences:
                rows += run_prefills(options.backends, options.kv_dtype, sequences, length)
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
