"""Attention over a latent cache (MLA) alone on a GPU: microseconds per layer of decode, TFLOP/s of prefill.

    python benchmarks/latent_attention.py [--only 32x8192] [--heads 16] [--json FILE]
    python benchmarks/latent_attention.py --tune [--only 32x8192]

Sizes are those of DeepSeek-V2: 512 numbers of a latent and 64 rotated ones per key. Decodes are replayed from CUDA
graphs over enough layers that no layer's keys stay in the GPU's cache. The floor is the time to read the keys once.
Every result is compared with the definition of attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attention import BYTES_PER_SECOND, COLD_BYTES, microseconds
from attrs import frozen
from sweep_timing import run_in_threads
from triton.errors import TritonError

from engine.ops.attention.latent_decode import LatentDecodeConfig, latent_decode, latent_decode_configs
from engine.ops.attention.latent_prefill import heads_per_tile, latent_prefill, latent_prefill_config
from engine.ops.attention.paged_prefill import prefill_tiles
from engine.ops.attention.paged_prefill_config import PrefillConfig
from engine.ops.common.launch import has_wgmma, shared_memory

LATENT, ROTATED, BLOCK_SIZE = 512, 64, 16
KEY_BYTES = (LATENT + ROTATED) * 2
DECODES = ("1x1024", "1x8192", "1x65536", "32x1024", "32x8192", "128x1024", "128x8192", "256x640")
PREFILLS = ("1x512", "16x2048", "1x8192")
TOLERANCE = 2e-2


@frozen
class Bench:
    """Random keys of several layers, and sequences over these with `new` queries each."""

    cache: torch.Tensor
    """[layers, blocks, block_size, 1, size of a key]."""
    tables: torch.Tensor
    context_lens: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    new: int

    @classmethod
    def make(cls, sequences: int, context: int, new: int, heads: int, layers: int) -> Bench:
        blocks = -(-context // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
        shape = (layers, len(order), BLOCK_SIZE, 1, LATENT + ROTATED)
        cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        tokens = sequences * new
        return cls(
            cache,
            torch.tensor(order.reshape(sequences, blocks), device="cuda"),
            torch.full((sequences,), context, dtype=torch.int32, device="cuda"),
            torch.randn(tokens, heads, LATENT + ROTATED, dtype=torch.bfloat16, device="cuda"),
            torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device="cuda"),
            new,
        )

    @classmethod
    def decode(cls, name: str, heads: int) -> Bench:
        sequences, context = map(int, name.split("x"))
        layers = max(2, min(96, -(-COLD_BYTES // (sequences * context * KEY_BYTES))))
        return cls.make(sequences, context, 1, heads, layers)

    @property
    def scale(self) -> float:
        return float((LATENT + ROTATED) ** -0.5)

    def floor(self) -> float:
        """Microseconds to read the keys of a layer once."""
        return self.cache[0].nbytes / BYTES_PER_SECOND * 1e6

    def decoding(self, config: LatentDecodeConfig) -> Callable[[int], None]:
        """Decode one layer."""
        workspace = config.make_workspace(self.q.shape[1], LATENT, self.q.device)

        def run(layer: int) -> None:
            latent_decode(
                self.q,
                self.cache[layer],
                self.tables,
                self.context_lens,
                self.out,
                num_sequences=len(self.tables),
                scale=self.scale,
                workspace=workspace,
                config=config,
            )

        return run

    def prefilling(self, config: PrefillConfig) -> Callable[[int], None]:
        """Compute the new tokens in one layer."""
        lens = [np.full(len(self.tables), length, np.int32) for length in (self.new, self.tables.shape[1] * BLOCK_SIZE)]
        group = heads_per_tile(self.q.shape[1], config)
        tiles = prefill_tiles(lens[0], lens[1], np.arange(len(self.tables)), config.tokens(group))
        listed = torch.tensor(tiles, device="cuda")

        def run(layer: int) -> None:
            latent_prefill(self.q, self.cache[layer], self.tables, listed, self.out, scale=self.scale, config=config)

        return run

    def error(self) -> float:
        """The relative error of the last token of the first and last sequence, in the first layer."""
        found, wanted = [], []
        for row in (0, -1):
            k = self.cache[0][self.tables[row].long()].flatten(0, 2).double()
            q = (self.q[self.new - 1] if row == 0 else self.q[-1]).double()
            wanted.append((q @ k.T * self.scale).softmax(-1) @ k[:, :LATENT])
            found.append((self.out[self.new - 1] if row == 0 else self.out[-1]).double())
        return float((torch.stack(found) - torch.stack(wanted)).norm() / torch.stack(wanted).norm())

    def time_decode(self, config: LatentDecodeConfig) -> tuple[float, float]:
        """Microseconds per layer in a CUDA graph, and the error."""
        run = self.decoding(config)
        layers = range(len(self.cache))
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in reversed(layers):
                run(layer)
        spent = microseconds(graph.replay) / len(layers)
        return spent, self.error()

    def time_prefill(self, config: PrefillConfig) -> tuple[float, float]:
        """Microseconds of one layer, and the error."""
        run = self.prefilling(config)
        run(0)
        error = self.error()
        return microseconds(lambda: run(0), 5), error


def prefill_flop(name: str, heads: int) -> float:
    """Operations of causal attention to latents: half of 2 * (2 * latent + rotated) per head and pair of positions."""
    sequences, length = map(int, name.split("x"))
    return float((2 * LATENT + ROTATED) * heads * sequences * length * length)


def decode_candidates(heads: int, sequences: int) -> Iterator[LatentDecodeConfig]:
    """The launch parameters of the backend first, then others."""
    configs = latent_decode_configs(heads, KEY_BYTES, 2, shared_memory(torch.device("cuda", 0)))
    chosen = next(config for limit, config in configs if sequences <= limit)
    yield chosen
    for block_n, warps, stages, programs in [(32, 4, 3, 2), (32, 4, 3, 1), (32, 4, 4, 1), (64, 4, 2, 1)]:
        yield attrs.evolve(chosen, block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs)


def prefill_candidates() -> Iterator[PrefillConfig]:
    """The launch parameters of the backend first, then others."""
    device = torch.device("cuda", 0)
    yield latent_prefill_config(KEY_BYTES, 2, shared_memory(device), wgmma=has_wgmma(device))
    for m, n, warps, stages in [(64, 32, 8, 3), (64, 16, 8, 4)]:
        yield PrefillConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)


def report(kind: str, name: str, spent: float, error: float, ideal: str, config: Any) -> dict[str, Any]:
    wrong = "" if error <= TOLERANCE else f"   WRONG: {error:.3g}"
    settings = " ".join(f"{key} {value}" for key, value in attrs.asdict(config).items())
    print(f"{kind:<8}{name:<10}{spent:>10.2f} us  {ideal}  {settings}{wrong}", flush=True)
    return {"kind": kind, "shape": name, "us": round(spent, 2), "error": error, "config": attrs.asdict(config)}


@frozen
class Measured:
    """A shape, and the launch parameters to try."""

    kind: str
    name: str
    configs: Sequence[Any]

    @property
    def sequences(self) -> int:
        return int(self.name.split("x")[0])

    @property
    def length(self) -> int:
        return int(self.name.split("x")[1])

    def bench(self, heads: int) -> Bench:
        if self.kind == "decode":
            return Bench.decode(self.name, heads)
        return Bench.make(self.sequences, self.length, self.length, heads, 1)

    def compile_calls(self, heads: int) -> list[Callable[[], object]]:
        """Calls that launch the kernels of each configuration on tiny sequences."""
        if self.kind == "decode":
            tiny = Bench.make(2 if self.sequences <= 16 else 32, 32, 1, heads, 1)
            return [lambda config=config: tiny.decoding(config)(0) for config in self.configs]
        tiny = Bench.make(2, 32, 16, heads, 1)
        return [lambda config=config: tiny.prefilling(config)(0) for config in self.configs]

    def measure(self, heads: int) -> list[dict[str, Any]]:
        """Measure and print each configuration; one that needs more than the GPU has is left out."""
        bench, rows = self.bench(heads), []
        for config in self.configs:
            try:
                spent, error = (bench.time_decode if self.kind == "decode" else bench.time_prefill)(config)
            except (TritonError, RuntimeError) as failure:
                print(f"{self.kind:<8}{self.name:<10}{config}: {str(failure)[:100]}", flush=True)
                continue
            ideal = f"{bench.floor() / spent:6.1%}"
            if self.kind == "prefill":
                ideal = f"{prefill_flop(self.name, heads) / spent / 1e6:5.0f} TFLOP/s"
            rows.append(report(self.kind, self.name, spent, error, ideal, config))
        return rows


def shapes(options: argparse.Namespace) -> Iterator[Measured]:
    """What the command line asks for."""
    count = None if options.tune else 1
    for kind, names in (("decode", DECODES), ("prefill", PREFILLS)):
        for name in names:
            if options.only and name not in options.only:
                continue
            found = (
                prefill_candidates() if kind == "prefill" else decode_candidates(options.heads, int(name.split("x")[0]))
            )
            yield Measured(kind, name, list(dict.fromkeys(itertools.islice(found, count))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="shapes to do, like 32x8192; may be repeated")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--tune", action="store_true", help="try other launch parameters too")
    parser.add_argument("--json", type=Path, help="write the results")
    options = parser.parse_args()
    torch.manual_seed(0)
    wanted = list(shapes(options))
    with torch.inference_mode():
        run_in_threads([call for one in wanted for call in one.compile_calls(options.heads)])
        rows = [row for one in wanted for row in one.measure(options.heads)]
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
