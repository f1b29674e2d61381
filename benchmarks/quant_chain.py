"""The quantized linear layers of a decoder block in sequence, as in a decode step: microseconds per block.

    python benchmarks/quant_chain.py [--models llama-3.1-8b qwen3-0.6b] [--kinds fp8 int8 4bit] [--rows 1 8]

Attention is left out; norms are included. With few rows, timing one layer alone says too little, since its programs
share the GPU with those of the kernels before and after. The rules of weight_only_tiles.default_tile for up to 8 rows
rest on this benchmark. It prints a block's time with the default tiles, and for each layer the best tiles in its place.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from attrs import evolve
from models import LINEARS
from triton.errors import TritonError

from engine.core.autotune import GraphTimer
from engine.ops.common.launch import has_wgmma, num_sms, shared_memory
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix, W8Layout, WeightLayout
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    FINE_TILE,
    PREFETCHED_BLOCKS,
    UNMEASURED_MAX_ROWS,
    GemmTile,
    WeightOnlyShape,
    WeightOnlyTile,
    WeightOnlyVectorTile,
    default_tile,
    with_even_splits,
    with_splits,
)
from engine.ops.norm.rms_norm import add_rms_norm

BANDWIDTH = 4.2e12
DTYPE = torch.bfloat16
COLD_BYTES = 400e6
"""Bytes of weights that one replay reads: some L2 caches of an H200."""
LAYOUTS: dict[str, WeightLayout] = {
    "fp8": W8Layout(dtype="float8_e4m3fn"),
    "int8": W8Layout(dtype="int8"),
    "4bit": GroupedLayout.choose(4, 128),
}
VECTORS = ((2, 8, 2), (4, 4, 1), (4, 8, 2), (4, 16, 4), (8, 4, 1), (8, 8, 2))
"""(rows of W, blocks, warps) of tiles for one row of x."""
MATRICES = ((16, 1, 6), (32, 1, 6), (32, 2, 6), (64, 2, 6), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6))
"""(rows of W, warps, stages) of tiles for up to UNMEASURED_MAX_ROWS rows."""
PROGRAMS_PER_SM = (1, 2, 3, 4)
"""Of FINE_TILE, at most."""
BEST = 4

Chosen = Mapping[str, GemmTile]


class Chain:
    """Decoder blocks of random weights, by default with more weights than the cache holds."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        kind: str,
        device: torch.device,
        *,
        dtype: torch.dtype = DTYPE,
        cold_bytes: float = COLD_BYTES,
        blocks: int = 4,
    ) -> None:
        """shapes: name of a layer of a block -> (rows of W, inputs), as in models.LINEARS. cold_bytes, blocks: minimum
        bytes of all weights, and minimum number of blocks."""
        self.device = device
        self.dtype = dtype
        self.layout = LAYOUTS[kind]
        self.shapes = shapes
        weights = sum(rows * inputs for rows, inputs in self.shapes.values())
        self.nbytes = weights * self.layout.bits / 8
        self.blocks = [
            {name: self._pack(*shape) for name, shape in self.shapes.items()}
            for _ in range(max(blocks, int(cold_bytes / self.nbytes)))
        ]
        self._norm = torch.ones(self.shapes["qkv"][1], dtype=self.dtype, device=device)
        self._multiplier = WeightOnlyMatmul(device)

    def _pack(self, outputs: int, inputs: int) -> PackedMatrix:
        if isinstance(self.layout, W8Layout):
            values = torch.randint(-127, 127, (outputs, inputs), device=self.device)
            if self.layout.dtype != "int8":
                values = values / 64
            packed = self.layout.as_words(self.layout.pack(values.to(getattr(torch, self.layout.dtype))))
            scales = torch.rand(outputs, device=self.device) / inputs
            return PackedMatrix(packed=packed, scales=scales, layout=self.layout)
        values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=self.device)
        scales = (torch.rand(inputs // 128, outputs, device=self.device) / inputs).to(self.dtype)
        packed, entries = self.layout.pack(values, scales, None, 128, self.dtype)
        return PackedMatrix(packed=packed, scales=entries, layout=self.layout)

    def gemm_shape(self, name: str) -> WeightOnlyShape:
        """The GEMM shape of a layer."""
        rows, inputs = self.shapes[name]
        return WeightOnlyShape(
            gated=name == "gate_up", weight_rows=rows, inputs=inputs, layout=self.layout, dtype=self.dtype
        )

    def default(self, name: str, rows: int) -> GemmTile:
        """The engine's default tile."""
        sms, shared = num_sms(self.device), shared_memory(self.device)
        tile = default_tile(self.gemm_shape(name), rows, sms, shared, wgmma=has_wgmma(self.device))
        assert tile is not None, "few rows are not left to the library"
        return tile

    def tiles(self, name: str, rows: int) -> list[GemmTile]:
        """Tiles to try for a layer, the default first."""
        found: list[GemmTile] = [self.default(name, rows)]
        if rows == 1:
            found += [WeightOnlyVectorTile(rows=count, blocks=blocks, warps=warps) for count, blocks, warps in VECTORS]
        for count, warps, stages in MATRICES:
            tile = WeightOnlyTile(
                rows=count, columns=UNMEASURED_MAX_ROWS, warps=warps, stages=stages, step=min(256, self.layout.block)
            )
            if tile.shared_memory(self.layout) <= shared_memory(self.device):
                found.append(with_splits(tile, self.gemm_shape(name), rows, num_sms(self.device)))
        fine = evolve(FINE_TILE, step=min(FINE_TILE.step, self.layout.block))
        if rows > 1 and fine.shared_memory(self.layout) <= shared_memory(self.device):
            for most in PROGRAMS_PER_SM:
                split = with_even_splits(fine, self.gemm_shape(name), rows, most * num_sms(self.device))
                found += [split, evolve(split, ahead=PREFETCHED_BLOCKS[self.layout.bits])]
        return list(dict.fromkeys(found))

    def compile(self, rows: int) -> None:
        """Compile all tiles, in threads."""
        with (
            ThreadPoolExecutor(os.cpu_count() or 1) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            for name, (_, inputs) in self.shapes.items():
                x = torch.empty(rows, inputs, dtype=self.dtype, device=self.device)
                for tile in self.tiles(name, rows):
                    self.compile_tile(name, tile, x)

    def compile_tile(self, name: str, tile: GemmTile, x: torch.Tensor) -> None:
        """Compile a layer's tile, as the active triton.AsyncCompileMode says. x: [rows, inputs]."""
        self._multiplier.compile(x, self.blocks[0][name], None, name == "gate_up", tile)

    def multiply(self, name: str, tile: GemmTile, x: torch.Tensor) -> torch.Tensor:
        """The product of a layer of the first block by a tile."""
        return self._multiplier.multiply_by_tile(x, self.blocks[0][name], None, name == "gate_up", tile)

    def run(self, x: torch.Tensor, residual: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        """x, residual: [rows, hidden size] -> the same after all blocks. The queries stand for attention's result."""

        def multiply(block: Mapping[str, PackedMatrix], name: str, x: torch.Tensor) -> torch.Tensor:
            return self._multiplier.multiply_by_tile(x, block[name], None, name == "gate_up", chosen[name])

        for block in self.blocks:
            x, residual = add_rms_norm(x, residual, self._norm, 1e-5)
            queries = multiply(block, "qkv", x)[:, : self.shapes["output"][1]]
            x, residual = add_rms_norm(multiply(block, "output", queries), residual, self._norm, 1e-5)
            x = multiply(block, "down", multiply(block, "gate_up", x))
        return x


def measure(chain: Chain, rows: int, timer: GraphTimer) -> None:
    """Print a block's time, and for each layer the best tiles while the other layers have their default."""
    chain.compile(rows)
    hidden = chain.shapes["qkv"][1]
    x, residual = torch.randn(2, rows, hidden, device=chain.device).to(DTYPE)

    def seconds(chosen: Chosen) -> float:
        return min(timer.replayed(lambda: chain.run(x, residual.clone(), chosen)) for _ in range(2)) / len(chain.blocks)

    default = {name: chain.default(name, rows) for name in chain.shapes}
    floor = chain.nbytes / BANDWIDTH * 1e6
    print(f"{rows} rows: {seconds(default) * 1e6:.1f} us per block, reading takes {floor:.1f}", flush=True)
    for name in chain.shapes:
        timed = []
        for tile in chain.tiles(name, rows):
            try:
                timed.append((seconds({**default, name: tile}) * 1e6, tile))
            except (TritonError, RuntimeError) as error:  # the compiler's passes raise the latter
                print(f"    {name}: {tile} fails: {error}")
        timed.sort(key=lambda pair: pair[0])
        for time, tile in timed[:BEST]:
            print(f"    {name:8s} {time:7.1f}  {tile}{'  (chosen)' if tile == default[name] else ''}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(LINEARS), default=list(LINEARS))
    parser.add_argument("--kinds", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--rows", nargs="*", type=int, choices=range(1, UNMEASURED_MAX_ROWS + 1), default=[1, UNMEASURED_MAX_ROWS]
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    with torch.inference_mode():
        timer = GraphTimer(device)
        for model in arguments.models:
            for kind in arguments.kinds:
                print(f"{model}, {kind}", flush=True)
                chain = Chain(LINEARS[model], kind, device)
                for rows in arguments.rows:
                    measure(chain, rows, timer)
                del chain
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
