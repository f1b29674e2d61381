"""The persistent prefill kernel at the edges of its tiles, halves and blocks; the conformance suite has the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.ops.attention.paged_prefill import paged_prefill
from engine.ops.attention.paged_prefill_config import PrefillConfig, PrefillWork, can_persist, persistent_config

from .prefill import check

COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.attention import persistent_prefill

short, loaded = sys.argv[1] == "short", sys.argv[1] == "loaded"
kernel = persistent_prefill._prefill_kernel if sys.argv[1] in ("short", "long") else persistent_prefill._ordered_kernel
constants = {
    "KV_HEADS": 8, "GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "WINDOWED": False, "SOFTCAP": False,
    "SINKS": False, "BLOCK_M": 128, "BLOCK_N": 64 if short else 128, "STAGES": 4 if short else 2,
    "ACROSS_TILES": short, "LOADED": loaded, "PDL": True,
}
constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
types = dict.fromkeys(("q", "keys", "values", "out"), "*bf16") | dict.fromkeys(("tables", "tiles", "order"), "*i32")
layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
rows = f"tensordesc<bf16[128, 128],{layout!r}>" if loaded else "*bf16"
types |= dict.fromkeys(("key_rows", "value_rows"), rows)
types |= dict.fromkeys(("scale", "softcap", "value_scale"), "fp32") | {"sinks": "*fp32"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
aligned = [number for number, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*")]
aligned += [kernel.arg_names.index(name) for name in ("q_stride", "out_stride")]
attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
source = GluonASTSource(kernel, signature, values, attributes)
print(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "launch_pdl": True}).asm["ptx"])
"""
"""Compiles a kernel for Hopper without a GPU; argument: short or long, for either way of pipelining, ordered for the
kernel with an order, loaded for that over consecutive blocks."""


@pytest.mark.parametrize(
    ("kernel", "commits_per_wait", "softmaxes"),
    [
        # Per half: scores of the first step, values of the last, and both products in steps without and with a mask.
        ("long", [1, 1, 2, 2], 3),
        ("ordered", [1, 1, 2, 2], 3),
        ("loaded", [1, 1, 2, 2], 3),
        # Per half: scores of the first step, and both products of other steps. In the last step of a tile, results are
        # waited for and stored before the scores.
        ("short", [0, 1, 2, 2], 2),
    ],
)
def test_kernel_has_both_products_of_a_step_in_flight_and_moves_16_bytes_at_once(
    kernel: str, commits_per_wait: list[int], softmaxes: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.split()[0] for line in done.stdout.splitlines() if line.strip().startswith("wgmma.")]
    waits = [number for number, step in enumerate(steps) if "wait_group" in step]
    commits = [steps[begin:end].count("wgmma.commit_group.sync.aligned;") for begin, end in pairwise([0, *waits])]
    assert sorted(commits) == sorted(2 * commits_per_wait)
    copies = [line for line in done.stdout.splitlines() if "cp.async.c" in line]
    assert copies
    assert all(", 0x10" in copy for copy in copies), copies[0]
    stores = [line for line in done.stdout.splitlines() if "st.global" in line]
    assert stores
    assert all(".v4.b32" in store for store in stores), stores[0]
    # Two rows per thread among 4 threads, per half: the maximum in each softmax, and the sum at a tile's end. A sum in
    # each softmax would add one more.
    assert done.stdout.count("shfl.sync.bfly") <= 2 * (softmaxes + 1) * 2 * 2


# Edges of blocks of 128 keys, of tiles of 128 rows and their halves, and more tiles than multiprocessors.
PERSISTENT_EDGES = ((0, 1), (0, 64), (0, 65), (127, 1), (127, 130), (128, 33), (300, 900))
KERNELS = pytest.mark.parametrize("keys", [1, 10_000])
"""Mean numbers of keys per new token that choose the kernel of short prompts, and the other."""


def config_for(dim: int, keys: int) -> PrefillConfig:
    return persistent_config(dim, PrefillWork(longest=1, keys=keys, tiles=1))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("page", "dtype"), [(8, torch.float16), (16, torch.bfloat16), (256, torch.bfloat16)])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 128), (4, 128), (7, 64), (128, 128)])
@pytest.mark.parametrize("moved", [False, True])
@KERNELS
def test_kernel_is_correct_at_tile_edges(
    group: int, dim: int, page: int, dtype: torch.dtype, keys: int, moved: bool
) -> None:
    config = config_for(dim, keys)
    check(PERSISTENT_EDGES, heads=(2 * group, 2), dim=dim, config=config, dtype=dtype, block_size=page, moved=moved)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("group", "dim"), [(1, 128), (3, 64), (4, 128), (7, 128)])
@KERNELS
def test_kernel_is_correct_where_the_first_block_of_a_tile_needs_a_mask(group: int, dim: int, keys: int) -> None:
    for cached in (*range(40, 64), *range(104, 128)):  # one by one, so that an error of few rows shows
        check(((cached, 25),), heads=(group, 1), dim=dim, config=config_for(dim, keys), dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 64), (6, 128), (8, 128)])
@KERNELS
def test_kernel_is_correct_when_programs_have_several_short_tiles(group: int, dim: int, keys: int) -> None:
    lengths = tuple((cached, new) for cached in (0, 60, 120) for new in (1, 7, 63, 64, 65, 129))
    config = config_for(dim, keys)
    check(lengths, heads=(33 * group, 33), dim=dim, config=config, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300, 1000])
@KERNELS
def test_kernel_handles_windows_and_soft_caps(window: int | None, softcap: float | None, keys: int) -> None:
    check(
        PERSISTENT_EDGES,
        heads=(8, 2),
        dim=128,
        config=config_for(128, keys),
        dtype=torch.bfloat16,
        window=window,
        softcap=softcap,
        value_scale=0.37,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("group", "dim"), [(3, 128), (8, 64)])
@KERNELS
def test_kernel_adds_sinks(group: int, dim: int, window: int | None, keys: int) -> None:
    heads = (2 * group, 2)
    check(
        PERSISTENT_EDGES,
        heads=heads,
        dim=dim,
        config=config_for(dim, keys),
        dtype=torch.bfloat16,
        window=window,
        has_sinks=True,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@KERNELS
def test_kernel_is_correct_in_many_turns_repeatedly(keys: int) -> None:
    for _ in range(3):
        check(
            ((0, 1500), (700, 1000), (5, 1)),
            heads=(16, 8),
            dim=128,
            config=config_for(128, keys),
            dtype=torch.bfloat16,
        )


@pytest.mark.parametrize("keys", [1, 10_000])
def test_kernels_refuse_tiles_instead_of_a_schedule_and_the_reverse(keys: int) -> None:
    x = torch.zeros(1, 1, 2, 64)
    tiles = torch.zeros((1, 4) if keys == 1 else (3, 1, 4), dtype=torch.int32)
    settings: Any = {"scale": 1.0, "softcap": None, "window": None, "config": config_for(64, keys)}
    wanted = "a schedule of prefill_schedule" if keys == 1 else "tiles of prefill_tiles"
    with pytest.raises(ValueError, match=f"its config needs {wanted}"):
        paged_prefill(x[0], x, x, tiles, tiles, x[0], **settings)


CONSECUTIVE = pytest.mark.parametrize("consecutive", [False, True])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("page", "dtype"), [(8, torch.float16), (256, torch.bfloat16)])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 64), (128, 128)])
@CONSECUTIVE
def test_kernel_is_correct_at_tile_edges_in_order(
    group: int, dim: int, page: int, dtype: torch.dtype, consecutive: bool
) -> None:
    config = config_for(dim, 10_000)
    lengths = (*PERSISTENT_EDGES, (128, 128), (1, 255), (500, 12))
    check(
        lengths,
        heads=(2 * group, 2),
        dim=dim,
        config=config,
        dtype=dtype,
        block_size=page,
        value_scale=0.37,
        ordered=True,
        consecutive=consecutive,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@CONSECUTIVE
def test_kernel_handles_soft_caps_and_sinks_in_order(consecutive: bool) -> None:
    check(
        PERSISTENT_EDGES,
        heads=(8, 2),
        dim=128,
        config=config_for(128, 10_000),
        dtype=torch.bfloat16,
        softcap=1.5,
        has_sinks=True,
        ordered=True,
        consecutive=consecutive,
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("heads", [(16, 8), (12, 3)])
@CONSECUTIVE
def test_kernel_is_correct_in_many_turns_in_order(heads: tuple[int, int], consecutive: bool) -> None:
    lengths = ((0, 1500), (700, 1000), (5, 1), (3000, 200), (0, 129))
    config = config_for(128, 10_000)
    for _ in range(3):
        check(
            lengths,
            heads=heads,
            dim=128,
            config=config,
            dtype=torch.bfloat16,
            ordered=True,
            consecutive=consecutive,
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_order_is_ignored_with_windows() -> None:
    lengths = ((0, 300), (200, 70))
    config = config_for(128, 10_000)
    check(lengths, heads=(8, 2), dim=128, config=config, dtype=torch.bfloat16, window=100, ordered=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"dim": 64}, True),
        ({"dim": 256}, False),
        ({"page": 4}, False),
        ({"group": 129}, False),
        ({"dtype": torch.float32}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
    ],
)
def test_can_persist_says_what_the_kernel_supports(change: Any, taken: bool) -> None:
    given = {"dim": 128, "page": 16, "group": 4, "dtype": torch.bfloat16} | change
    keys = torch.empty(2, given["page"], 1, given["dim"], dtype=given.get("kv_dtype", given["dtype"]), device="cuda")
    assert can_persist(keys, given["dtype"], given["group"]) is taken


def test_can_persist_is_false_on_a_cpu() -> None:
    assert not can_persist(torch.empty(2, 16, 1, 128, dtype=torch.bfloat16), torch.bfloat16, 4)
