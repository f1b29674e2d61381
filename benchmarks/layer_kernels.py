"""Times of each fused kernel, microseconds replayed from a CUDA graph, next to the floor of memory traffic.

    python benchmarks/layer_kernels.py [--tune] [--only norm rope silu quantize argmax host linear] [--json FILE]

Operands rotate over more memory than the L2 cache holds. Floor: bytes read and written over 4.2 TB/s. For the linears,
`pair` is the time with a norm before each, as the tuner measures it, and `alone` without. --tune: the best three tiles
of each linear. quantize: norm and activation with fused quantization to float8, next to separate kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from engine.cli.bench.report import Row, report, write
from engine.core.autotune import AutotunedCall, GraphTimer, Operands, TuningTask, group_calls, measure
from engine.core.layers import SkinnyGemms
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.attention.rope_and_cache import angles, rotate_and_write
from engine.ops.gemm.skinny_launch import GemmShape, SkinnyTile
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize
from engine.ops.sampling.argmax import argmax_rows

BANDWIDTH = 4.2e12
DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
COLD_BYTES = 150e6
"""Bytes of all operands of one replay: three L2 caches of an H200."""
ROWS = (1, 8, 32, 256, 8192)
MANY_ROWS = (33, 64, 128, 256, 1024, 4096, 16384)
"""Numbers of rows that are quantized."""
HIDDEN = (1024, 4096)
INTERMEDIATE = (3072, 14336)
CODES = torch.float8_e4m3fn
LINEARS = (
    ("plain", 6144, 4096),
    ("plain", 4096, 4096),
    ("gated", 14336, 4096),
    ("plain", 28672, 4096),
    ("plain", 4096, 14336),
    ("plain", 128256, 4096),
    ("argmax", 128256, 4096),
    ("plain", 4096, 1024),
    ("plain", 1024, 2048),
    ("gated", 3072, 1024),
    ("plain", 6144, 1024),
    ("plain", 1024, 3072),
    ("argmax", 151936, 1024),
)
"""Linear layers of Llama-3.1-8B and Qwen3-0.6B."""

Timed = tuple[str, float, float]
"""Name, seconds and bytes of a kernel."""


def randn(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU, in the measured dtype."""
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def rotated(timer: GraphTimer, nbytes: float, make: Callable[..., Callable[[], object]], *sizes: int) -> float:
    """Seconds per call of the function that `make` returns, over 4 to 64 sets of operands, so that caches are cold."""
    calls = [make(*sizes) for _ in range(min(max(int(COLD_BYTES / nbytes), 4), 64))]

    def all_calls() -> None:
        for call in calls:
            call()

    return timer.replayed(all_calls) / len(calls)


def make_norm(rows: int, size: int) -> Callable[[], object]:
    """Residual addition and norm."""
    x, residual, weight = randn(rows, size), randn(rows, size), randn(size)
    return lambda: add_rms_norm(x, residual, weight, 1e-5)


def make_silu(rows: int, size: int) -> Callable[[], object]:
    """Activation of the gated MLP."""
    x = randn(rows, 2 * size)
    return lambda: act_and_mul(x)


def make_norm_quantize(rows: int, size: int, fused: bool) -> Callable[[], object]:
    """Residual addition, norm and quantization."""
    x, residual, weight = randn(rows, size), randn(rows, size), randn(size)
    if fused:
        return lambda: add_rms_norm_quantize(x, residual, weight, 1e-5, CODES)
    return lambda: quantize_rows(add_rms_norm(x, residual, weight, 1e-5)[0], CODES)


def make_silu_quantize(rows: int, size: int, fused: bool) -> Callable[[], object]:
    """Activation and quantization."""
    x = randn(rows, 2 * size)
    if fused:
        return lambda: act_and_mul_quantize(x, CODES)
    return lambda: quantize_rows(act_and_mul(x), CODES)


def make_argmax(rows: int, size: int) -> Callable[[], object]:
    """Argmax over the vocabulary."""
    logits = randn(rows, size)
    return lambda: argmax_rows(logits)


def make_angles(rows: int) -> Callable[[], object]:
    """Rotary embedding of heads of 128 dimensions."""
    positions, frequencies = torch.randint(0, 4096, (rows,), device=DEVICE), torch.rand(64, device=DEVICE)
    return lambda: angles(positions, frequencies, 1.0)


def make_rope(rows: int, heads: int, normed: bool) -> Callable[[], object]:
    """Norm of heads, rotation and cache write; 8 KV heads."""
    qkv = randn(rows, (heads + 16) * 128)
    pages = torch.empty(2, -(-rows // 16) + 64, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    slots = torch.randperm(pages.shape[1] * 16, device=DEVICE)[:rows]
    cos, sin = angles(slots, torch.rand(64, device=DEVICE), 1.0)
    weight = randn(heads + 8, 128) if normed else None
    return lambda: rotate_and_write(qkv, pages[0], pages[1], slots, cos, sin, heads, weight, 1e-6)


def time_norm(timer: GraphTimer) -> list[Timed]:
    """Reads and writes x or its norm, and the residual."""
    return [
        (f"add_rms_norm {rows}x{size}", rotated(timer, nbytes, make_norm, rows, size), nbytes)
        for size in HIDDEN
        for rows in ROWS
        for nbytes in [4 * rows * size * DTYPE.itemsize]
    ]


def time_silu(timer: GraphTimer) -> list[Timed]:
    """Reads two, writes one."""
    return [
        (f"silu_and_mul {rows}x{size}", rotated(timer, nbytes, make_silu, rows, size), nbytes)
        for size in INTERMEDIATE
        for rows in ROWS
        for nbytes in [3 * rows * size * DTYPE.itemsize]
    ]


def time_quantize(timer: GraphTimer) -> list[Timed]:
    """Fused: reads the inputs of norm or activation, writes quantized values and the norm's residual. Two kernels: also
    write and read the 16-bit result."""
    kinds: list[tuple[str, Callable[..., Callable[[], object]], Sequence[int], int]] = [
        ("norm", make_norm_quantize, HIDDEN, 3),
        ("silu", make_silu_quantize, INTERMEDIATE, 2),
    ]
    return [
        (f"{name}, quantize {rows}x{size}, {way}", rotated(timer, nbytes, make, rows, size, fused), nbytes)
        for name, make, sizes, numbers in kinds
        for size in sizes
        for rows in MANY_ROWS
        for way, fused, more in (("fused", True, 0), ("two", False, 2))
        for nbytes in [rows * size * ((numbers + more) * DTYPE.itemsize + 1)]
    ]


def time_argmax(timer: GraphTimer) -> list[Timed]:
    """Reads logits."""
    return [
        (f"argmax_rows {rows}x151936", rotated(timer, nbytes, make_argmax, rows, 151936), nbytes)
        for rows in (1, 8, 32, 256)
        for nbytes in [rows * 151936 * DTYPE.itemsize]
    ]


def time_rope(timer: GraphTimer) -> list[Timed]:
    """Reads qkv, writes queries and keys back, and keys and values to the cache."""
    found = [(f"angles {rows}", rotated(timer, rows * 520, make_angles, rows), rows * 520.0) for rows in ROWS]
    for name, heads, normed in (("Llama-3.1-8B", 32, False), ("Qwen3-0.6B", 16, True)):
        for rows in ROWS:
            nbytes = rows * 128 * DTYPE.itemsize * ((heads + 16) + (heads + 8) + 16)
            found.append(
                (f"rotate_and_write {name} {rows}", rotated(timer, nbytes, make_rope, rows, heads, normed), nbytes)
            )
    return found


def time_host() -> list[Timed]:
    """Host seconds per launch, eager, without waiting for the device."""
    x, weight, residual = randn(1, 4096), randn(4096), randn(1, 4096)
    qkv, pages = randn(1, 48 * 128), torch.empty(2, 4, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    slots, frequencies = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.rand(64, device=DEVICE)
    cos, sin = angles(slots, frequencies, 1.0)
    table = SkinnyGemms("cuda:0").gemm(GemmShape(epilogue="plain", outputs=4096, inputs=4096, dtype="bfloat16"))
    matrix, wide = randn(4096, 4096), randn(1, 8192)
    launch = table.launches[1]
    assert launch is not None
    calls: dict[str, Callable[[], object]] = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "F.linear": lambda: torch.nn.functional.linear(x, matrix),
        "add_rms_norm": lambda: add_rms_norm(x, residual, weight, 1e-5),
        "silu_and_mul": lambda: act_and_mul(wide),
        "quantize_rows": lambda: quantize_rows(x, CODES),
        "add_rms_norm_quantize": lambda: add_rms_norm_quantize(x, residual, weight, 1e-5, CODES),
        "silu_and_mul_quantize": lambda: act_and_mul_quantize(wide, CODES),
        "rotate_and_write": lambda: rotate_and_write(qkv, pages[0], pages[1], slots, cos, sin, 32),
        "skinny": lambda: launch(x, matrix),
    }
    found: list[Timed] = []
    for name, call in calls.items():
        spent = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            spent.append((time.perf_counter() - begin) / 100)
        found.append((f"host: {name}", sorted(spent)[3], 0.0))
    return found


def time_linear(timer: GraphTimer, gemm_shape: GemmShape, show: int) -> list[Row]:
    """Torch next to the best tile, at each number of rows. Prints `show` tiles."""
    tasks = make_tasks(gemm_shape)
    floor = tasks[0].operands[0].nbytes / BANDWIDTH
    found = []
    for task, pairs in zip(tasks, measure(tasks, timer), strict=True):
        rows = task.rows
        ranked = sorted((tile for tile in pairs if tile is not None), key=lambda tile: pairs[tile])
        line = [f"{gemm_shape!s:<32}{rows:>3} rows  floor {floor * 1e6:6.1f}"]
        for name, tile in (("torch", None), ("best", ranked[0])):
            pair, alone = pairs[tile], time_alone(timer, task, tile)
            rate = floor * BANDWIDTH / alone / 1e12
            line.append(f"{name} pair {pair * 1e6:6.1f} alone {alone * 1e6:6.1f} ({rate:4.2f} TB/s)")
            found.append(Row(metric=f"{gemm_shape} {rows} rows, {name}, pair", value=pair * 1e6, unit="us"))
            found.append(Row(metric=f"{gemm_shape} {rows} rows, {name}, alone", value=alone * 1e6, unit="us"))
        print("  ".join(line), flush=True)
        for tile in ranked[:show]:
            print(f"        {pairs[tile] * 1e6:6.1f}  {tile}")
    return found


def time_alone(timer: GraphTimer, task: TuningTask, tile: SkinnyTile | None) -> float:
    """Seconds of one GEMM in a sequence of equal ones."""
    x = randn(task.rows, task.op.inputs)

    def calls() -> None:
        for operands in task.operands:
            task.op.run(tile, x, operands)

    return timer.replayed(calls) / len(task.operands)


def make_tasks(gemm_shape: GemmShape) -> list[TuningTask]:
    """A task with enough layers that caches are cold."""
    nbytes = gemm_shape.weight_rows * gemm_shape.inputs * DTYPE.itemsize
    table = SkinnyGemms(str(DEVICE)).gemm(gemm_shape)
    return group_calls(
        AutotunedCall(op=table, operands=Operands(weights={"weight": randn(gemm_shape.weight_rows, gemm_shape.inputs)}))
        for _ in range(min(max(int(COLD_BYTES / nbytes) + 1, 2), 16))
    )


def show(timed: Sequence[Timed]) -> list[Row]:
    """Print a table of the times."""
    rows = []
    for name, seconds, nbytes in timed:
        rate = f"{nbytes / seconds / 1e9:7.0f} GB/s, floor {nbytes / BANDWIDTH * 1e6:7.1f} us" if nbytes else ""
        print(f"{name:<40}{seconds * 1e6:8.1f} us  {rate}", flush=True)
        rows.append(Row(metric=name, value=seconds * 1e6, unit="us"))
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", nargs="*", default=["norm", "rope", "silu", "quantize", "argmax", "host", "linear"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    with torch.inference_mode():
        timer = GraphTimer(DEVICE)
        sections = {
            "norm": time_norm,
            "rope": time_rope,
            "silu": time_silu,
            "quantize": time_quantize,
            "argmax": time_argmax,
        }
        for name, section in sections.items():
            if name in arguments.only:
                rows += show(section(timer))
                torch.cuda.empty_cache()
        if "host" in arguments.only:
            rows += show(time_host())
        if "linear" in arguments.only:
            for epilogue, outputs, inputs in LINEARS:
                gemm_shape = GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype="bfloat16")
                rows += time_linear(timer, gemm_shape, 3 if arguments.tune else 0)
                torch.cuda.empty_cache()
    if arguments.json is not None:
        machine = f"{torch.cuda.get_device_name(DEVICE)}, triton {triton.__version__}"
        write(arguments.json, report("kernels", machine, rows, {"dtype": "bfloat16", "bandwidth": BANDWIDTH}))


if __name__ == "__main__":
    main()
