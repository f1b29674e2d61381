"""The prefill kernel where its tiles and blocks of keys meet, and the list of tiles; the suite has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from engine.core.attention import AttentionSpec
from engine.plugins.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_config, prefill_tiles
from engine.testing.attention import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
PAGE = 16
SMALL = PrefillConfig(rows=32, keys=16, warps=4, stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]


def check(
    lengths,
    *,
    heads=(2, 1),
    dim=32,
    window=None,
    softcap=None,
    config=SMALL,
    dtype=torch.float32,
    kv_dtype=None,
    value_scale=1.0,
):
    """lengths: (cached, new) of each sequence; the first row of q is a decode's, which is to be left alone."""
    torch.manual_seed(0)
    kv_dtype = kv_dtype or dtype
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(counts) + 1).tolist()
    pool = [torch.full((sum(counts) + 1, PAGE, heads[1], dim), torch.nan) for _ in range(2)]
    tables = torch.full((1 + len(lengths), max(counts)), order.pop(), dtype=torch.int32)
    starts = np.cumsum([0, 1, *(new for _, new in lengths)])
    q = torch.randn(int(starts[-1]), heads[0] + 2 * heads[1], dim).to(dtype).to(DEVICE)[:, : heads[0]]
    spec = AttentionSpec(
        num_layers=1,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        scale=dim**-0.5,
        dtype="float32",
        kv_dtype="float32",
        page_size=PAGE,
        max_len=max(contexts),
        sliding_windows=(window,),
        softcap=softcap,
    )
    expected = []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True), start=1):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        at = torch.arange(context)
        blocks = tables[row][at // PAGE].long()
        k, v = (torch.randn(context, heads[1], dim).to(kv_dtype).float() for _ in range(2))
        pool[0][blocks, at % PAGE], pool[1][blocks, at % PAGE] = k, v
        v = v.double() * value_scale
        expected.append(dense_attention(q[starts[row] : starts[row + 1]].cpu(), k, v, spec, window))
    tiles = prefill_tiles(
        np.diff(starts).astype(np.int32), np.array([1, *contexts], np.int32), 1, config.tokens(heads[0] // heads[1])
    )
    out = torch.full(q.shape, -7.0, dtype=dtype, device=DEVICE)
    paged_prefill(
        q,
        *(part.to(kv_dtype).to(DEVICE) for part in pool),
        tables.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([1, *contexts], dtype=torch.int32, device=DEVICE),
        torch.from_numpy(tiles).to(DEVICE),
        out,
        scale=spec.scale,
        softcap=softcap,
        window=window,
        value_scale=value_scale,
        config=config,
    )
    assert (out[0] == -7).all(), "a decode's row was written"
    wanted = torch.cat(expected)
    assert (out[1:].double().cpu() - wanted).norm() / wanted.norm() <= TOLERANCE[dtype]


# Stretches that begin and end at, before and after a block of keys and a tile of tokens.
EDGES = ((0, 1), (0, 16), (0, 17), (15, 16), (16, 33), (31, 2), (100, 1))


def test_stretches_at_the_edges_of_tiles():
    check(EDGES)


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_windows_at_the_edges_of_tiles(window):
    check(EDGES, window=window)


def test_a_soft_cap():
    check(((20, 30),), softcap=1.5)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_groups_that_do_not_fill_a_tile(group):
    check(((9, 12), (0, 5)), heads=(2 * group, 2))


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_heads_of_any_multiple_of_16(dim):
    check(((9, 12),), dim=dim)


@pytest.mark.parametrize("config", [(16, 64, 4, 2), (64, 16, 4, 3), (128, 64, 8, 3)])
def test_launches(config):
    rows, keys, warps, stages = config
    check(((40, 75),), config=PrefillConfig(rows=rows, keys=keys, warps=warps, stages=stages), dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("longest", [16, 700])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_launches_that_are_chosen(dim, longest, window):
    config = prefill_config(longest, 4, dim, 2, 233472)
    check(((333, longest), (0, 7)), heads=(8, 2), dim=dim, config=config, dtype=torch.bfloat16, window=window)


def test_a_cache_of_8_bits():
    check(((20, 30),), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)


def test_values_that_count_more_than_once():
    check(((20, 30), (0, 5)), kv_dtype=torch.float8_e4m3fn, value_scale=0.37)


def test_tiles_cover_each_new_token_once_the_most_work_first():
    queries = np.array([1, 5, 8, 9], np.int32)
    contexts = np.array([70, 5, 20, 9], np.int32)
    assert prefill_tiles(queries, contexts, 1, 4).tolist() == [[2, 4], [2, 0], [3, 8], [3, 4], [3, 0], [1, 4], [1, 0]]


@pytest.mark.parametrize("shared_memory", [65536, 102400, 167936, 233472])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_a_launch_fits_a_multiprocessor_and_its_tile_a_token(group, itemsize, shared_memory):
    for longest in (1, 16, 5000):
        config = prefill_config(longest, group, 128, itemsize, shared_memory)
        assert config.tokens(group) >= 1
        assert config.rows & (config.rows - 1) == 0
        assert (config.rows + 2 * config.stages * config.keys) * 128 * itemsize < shared_memory
    assert prefill_config(5000, 4, 128, 2, 233472).rows == 128
    assert prefill_config(16, 4, 128, 2, 233472).rows == 64
