#!/usr/bin/env python3
"""Writes the tuning results that come with the package, for the GPU of this machine and the layers of known models.

    python scripts/tune_kernels.py [--formats none fp8] [--again 64 128] [--cache DIRECTORY]

Valid results in the tuning cache and in the package are kept; the others are measured. With --again, the package's
results for these row classes are measured again, as when there are new candidates.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from engine.core.autotune import (
    GraphTimer,
    TuningCache,
    TuningResults,
    collect_tasks,
    default_directory,
    describe_machine,
    load_shipped,
    store_shipped,
    tune_tasks,
)
from engine.core.layers import LayerFactory
from engine.core.plugin_host import load_plugins
from engine.core.weights import DummySource, load_weights

W4A16: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "type": "int",
                "symmetric": True,
                "dynamic": False,
                "num_bits": 4,
                "strategy": "group",
                "group_size": 128,
            },
        }
    },
}
FORMATS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    "none": ("none", None),
    "fp8": ("fp8", None),
    "int8": ("int8", None),
    "w4a16": ("compressed-tensors", W4A16),
}
"""Format of the weights -> its plugin, and quantization_config of the checkpoint."""
DTYPE = "bfloat16"


@frozen(kw_only=True)
class Shapes:
    """The sizes of a decoder's linear layers."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int

    @property
    def linears(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) of each layer but the LM head; of a gated one the outputs of both halves."""
        yield "qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden
        yield "output", self.hidden, self.heads * self.head_dim
        yield "gate_up", 2 * self.intermediate, self.hidden
        yield "down", self.hidden, self.intermediate


QWEN3, LLAMA3 = 151936, 128256
"""Sizes of the vocabularies."""
MODELS = {
    "llama-3.1-8b": Shapes(hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=LLAMA3),
    "qwen3-0.6b": Shapes(hidden=1024, intermediate=3072, heads=16, kv_heads=8, vocabulary=QWEN3),
    "qwen3-8b": Shapes(hidden=4096, intermediate=12288, heads=32, kv_heads=8, vocabulary=QWEN3),
    "qwen3-4b": Shapes(hidden=2560, intermediate=9728, heads=32, kv_heads=8, vocabulary=QWEN3),
    "qwen3-1.7b": Shapes(hidden=2048, intermediate=6144, heads=16, kv_heads=8, vocabulary=QWEN3),
    "llama-3.2-1b": Shapes(hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocabulary=LLAMA3),
    "llama-3.2-3b": Shapes(hidden=3072, intermediate=8192, heads=24, kv_heads=8, vocabulary=LLAMA3),
    "qwen3-14b": Shapes(hidden=5120, intermediate=17408, heads=40, kv_heads=8, vocabulary=QWEN3),
    "qwen3-32b": Shapes(hidden=5120, intermediate=25600, heads=64, kv_heads=8, vocabulary=QWEN3),
}


class PartlyOutdatedCache(TuningCache):
    """A tuning cache that ignores the package's results for some row classes."""

    def __init__(self, directory: Path, machine: Mapping[str, str], outdated: Collection[int]) -> None:
        """outdated: the row classes whose shipped results are ignored."""
        super().__init__(directory, machine)
        self._outdated = outdated

    def shipped(self) -> TuningResults:
        return {key: result for key, result in super().shipped().items() if key[1] not in self._outdated}


def make_layers(shapes: Shapes, weights: str, device: torch.device, timer: GraphTimer) -> LayerFactory:
    """Linear layers of a decoder's shapes, of each as many copies as keep their weights out of the GPU's cache."""
    name, checkpoint = FORMATS[weights]
    method = load_plugins().quant.get(name).load().from_checkpoint(checkpoint, None)
    layers = LayerFactory(dtype=DTYPE, device=str(device), quant=method, fused=True)
    for kind, outputs, inputs in shapes.linears:
        nbytes = outputs * inputs // 2 if weights == "w4a16" else outputs * inputs
        for number in range(timer.cold_layers(nbytes)):
            parts = [(f"{number}.{kind}", outputs)]
            if kind == "gate_up":
                parts = [(f"{number}.{half}", outputs // 2) for half in ("gate", "up")]
            layers.linear(parts, inputs, gated=kind == "gate_up")
    if weights == "none":
        layers.lm_head("lm_head", shapes.vocabulary, shapes.hidden)
    load_weights(layers, DummySource())
    return layers


def main() -> None:
    """Tune the layers of each model and format, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--again", nargs="+", type=int, default=[], metavar="ROWS", help="row classes to measure again")
    parser.add_argument("--cache", type=Path, default=default_directory(), help="the tuning cache")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further layers after this time")
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    machine, begin = describe_machine(device), time.monotonic()
    cache, timer = PartlyOutdatedCache(arguments.cache, machine, arguments.again), GraphTimer(device)
    found = dict(load_shipped(machine))
    for weights, model in itertools.product(arguments.formats, arguments.models):
        if time.monotonic() - begin > arguments.seconds:
            print(f"{model}, {weights}: left out")
            continue
        with torch.inference_mode():
            report = tune_tasks(collect_tasks(make_layers(MODELS[model], weights, device, timer)), cache, timer)
        found |= {(result.op, result.rows): result for result in report.results}
        path = store_shipped(machine, found.values())
        print(
            f"{model}, {weights}: {report.measured} of {len(report.results)} measured, {report.seconds:.1f} s, {path}"
        )


if __name__ == "__main__":
    main()
