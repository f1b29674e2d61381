"""Blocks of 8-bit linear layers at 2 to 64 rows, with activations in 16 bits (W8A16) and quantized (W8A8).

    python benchmarks/w8a8_rows.py [--models llama-3.1-8b qwen3-0.6b] [--formats fp8 int8 fp8-block] [--rows 8 9 16 32]

Microseconds per block from CUDA graphs with cold weights: the linear layers with norms, activation and quantization as
a model runs them, without attention. Both ways are timed in turns, in random order; medians. W8A16_MAX_ROWS_WGMMA of
plugins/quant/w8_gpu.py rests on this benchmark. Tiles are those of the package or of the tuning cache; others are
measured first. --shards: the layers of one of that many ranks, where a kernel of its
own quantizes the inputs of qkv and of gate and up, as the norm that reduces over the ranks does not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.autotune import GraphTimer, TuningCache, collect_tasks, default_directory, describe_machine, tune_tasks
from engine.core.layers import LayerFactory
from engine.core.plugin_host import load_plugins
from engine.core.weights import DummySource, load_weights
from engine.plugins.quant import w8_gpu

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from tune_kernels import MODELS, Shapes

FORMATS = {"fp8": ("fp8", {}), "fp8-block": ("fp8", {"granularity": "block"}), "int8": ("int8", {})}
"""Plugin and its options."""
DEVICE = torch.device("cuda", 0)
MAX_BLOCKS = 24
COLD_BYTES = 200e6
"""Bytes of weights that one replay reads at least: some L2 caches."""
MOST_W8A16 = 32
"""Up to this many rows there are W8A16 tiles."""


CLASSES = (16, 32, 64)
"""Row classes for the numbers of rows measured."""


class Chain:
    """Decoder blocks of random weights."""

    def __init__(
        self, shapes: Shapes, weights: str, shards: int, timer: GraphTimer, classes: Sequence[int] = CLASSES
    ) -> None:
        """shards: ranks that share each layer. classes: row classes that are tuned."""
        plugin, options = FORMATS[weights]
        cls = load_plugins().quant.get(plugin).load()
        method = cls.from_checkpoint(None, cls.options_class(**options))
        self.layers = layers = LayerFactory(dtype="bfloat16", device=str(DEVICE), quant=method, fused=True)
        sizes = {name: (outputs, inputs) for name, outputs, inputs in shapes.linears}
        self.hidden = shapes.hidden
        self.attention = sizes["output"][1] // shards
        self._fused = shards == 1
        nbytes = sum(outputs * inputs for outputs, inputs in sizes.values()) / shards
        both = sizes["gate_up"][0] // shards
        self.blocks: list[Sequence[Any]] = [
            (
                layers.norm(f"{number}.first", self.hidden, 1e-5),
                layers.linear([(f"{number}.qkv", sizes["qkv"][0] // shards)], self.hidden),
                layers.linear([(f"{number}.output", self.hidden)], self.attention),
                layers.norm(f"{number}.second", self.hidden, 1e-5),
                layers.linear([(f"{number}.{half}", both // 2) for half in ("gate", "up")], self.hidden, gated=True),
                layers.linear([(f"{number}.down", self.hidden)], both // 2),
            )
            for number in range(max(2, min(MAX_BLOCKS, int(COLD_BYTES / nbytes) + 1)))
        ]
        load_weights(layers, DummySource())
        tasks = [task for task in collect_tasks(layers) if task.rows in classes]
        tune_tasks(tasks, TuningCache(default_directory(), describe_machine(DEVICE)), timer)

    def run(self, x: torch.Tensor, residual: torch.Tensor, attention: torch.Tensor) -> None:
        """x, residual: [rows, hidden]; attention: what stands for attention's results, [rows, attention]."""
        for first, qkv, output, second, gate_up, down in self.blocks:
            y, residual = first.quantized_for(qkv, x, residual) if self._fused else first(x, residual)
            qkv(y)
            y = output(attention)
            y, residual = second.quantized_for(gate_up, y, residual) if self._fused else second(y, residual)
            x = down(gate_up.gated_quantized_for(down, y))


def set_w8a16_rows(rows: int) -> None:
    """Quantize activations of more rows than that."""
    w8_gpu.W8A16_MAX_ROWS = w8_gpu.W8A16_MAX_ROWS_WGMMA = rows


def measure(chain: Chain, rows: Sequence[int], rounds: int, timer: GraphTimer) -> dict[tuple[int, bool], float]:
    """Microseconds per block, by rows and whether activations are quantized."""
    cases = [(count, quantized) for count in rows for quantized in (False, True) if quantized or count <= MOST_W8A16]
    sizes = (chain.hidden, chain.hidden, chain.attention)
    inputs = {count: [torch.randn(count, size, device=DEVICE).bfloat16() for size in sizes] for count in rows}
    times: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in random.sample(cases, len(cases)):
            set_w8a16_rows(0 if case[1] else MOST_W8A16)
            x, residual, attention = inputs[case[0]]
            seconds = timer.replayed(
                lambda given=(x, residual, attention): chain.run(given[0], given[1].clone(), given[2])
            )
            times[case].append(seconds / len(chain.blocks) * 1e6)
    return {case: statistics.median(found) for case, found in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=["fp8", "int8"])
    parser.add_argument("--rows", nargs="*", type=int, default=[4, 8, 9, 16, 24, 32, 64])
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    timer = GraphTimer(DEVICE)
    for model in arguments.models:
        for weights in arguments.formats:
            set_w8a16_rows(MOST_W8A16)  # so that tiles of both are there
            with torch.inference_mode():
                chain = Chain(MODELS[model], weights, arguments.shards, timer)
                found = measure(chain, arguments.rows, arguments.rounds, timer)
            print(f"{model} {weights}, {arguments.shards} shards: rows, W8A16, W8A8, us per block")
            for rows in arguments.rows:
                first = f"{found[rows, False]:7.1f}" if rows <= MOST_W8A16 else 7 * " "
                print(f"  {rows:4d} {first} {found[rows, True]:7.1f}", flush=True)
            del chain
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
