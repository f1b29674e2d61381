"""Perplexity of the demo model with prompts computed in float8, as `prefill_dtype = "fp8"` of the Triton backend does.

    python benchmarks/float8_prefill_perplexity.py [--characters 30000] [--json FILE]

Runs on a CPU: attention of prompts is the emulation that the kernel's tests compare with, which rounds queries and
softmax weights as the kernel does and sums exactly. The text is that of quant_perplexity.py. Rows: a 16-bit cache, a
float8 cache, and prompts in float8 over a float8 cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import engine.demo
from engine.cli.bench.report import Row, report, write
from engine.core.attention import ForwardBatch, GraphSlot
from engine.plugins.attention.torch import TorchAttention
from engine.quantize.perplexity import perplexity

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from demo_model.sources import held_out_text

from tests.ops.attention.prefill import float8_attention


class EmulatedFloat8Prefill(TorchAttention):
    """Computes prompts as persistent_float8 does, whatever their length."""

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Any:
        return batch, super().plan(batch, graph)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        batch, plans = plan
        out, scales = super().forward(layer, q, k, v, plans), self._scales[layer]
        begin = batch.num_decodes
        for row in range(batch.num_decodes, batch.num_sequences):
            count, context = int(batch.query_lens_host[row]), int(batch.context_lens_host[row])
            positions = torch.arange(context)
            blocks = torch.from_numpy(batch.block_tables_host[row])[positions // self._spec.block_size].long()
            slots = blocks * self._spec.block_size + positions % self._spec.block_size
            keys, values = self._gather(layer, slots)
            rows, window = slice(begin, begin + count), self._spec.sliding_windows[layer]
            scaled = keys * scales.key, values * scales.value
            out[rows] = float8_attention(q[rows], *scaled, self._spec, window, self._sinks[layer]).to(out.dtype)
            begin += count
        return out


CASES: dict[str, dict[str, Any]] = {
    "16-bit cache": {},
    "fp8 KV cache": {"cache__dtype": "fp8"},
    "fp8 KV cache, prompts in fp8": {"cache__dtype": "fp8", "attention": EmulatedFloat8Prefill},
}


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=30_000, help="of the held-out text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = held_out_text()[: arguments.characters]
    rows: list[Row] = []
    for name, settings in CASES.items():
        found = perplexity(engine.demo.path(), text, executor__device="cpu", **settings)
        rows.append(Row(metric="perplexity", case=name, value=found.value, unit="perplexity"))
        print(f"{name:<32}{found.value:9.4f} {found.value / rows[0].value - 1:+8.3%}", flush=True)
    if arguments.json is not None:
        settings = {"model": "engine-demo", "characters": len(text), "arithmetic": "float32"}
        write(arguments.json, report("float8-prefill-perplexity", "cpu", rows, settings))


if __name__ == "__main__":
    main()
