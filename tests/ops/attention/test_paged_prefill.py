"""The prefill kernel where its tiles and blocks of keys meet, and the list of tiles; the suite has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from engine.ops.attention.paged_prefill import PERSISTENT, PrefillConfig, prefill_config, prefill_tiles

from .prefill import check

pytestmark = [] if triton.knobs.runtime.interpret else [pytest.mark.gpu]

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
    assert prefill_tiles(queries, contexts, 1, 4).tolist() == [
        [2, 16, 10, 4],
        [2, 12, 6, 4],
        [3, 8, 22, 1],
        [3, 4, 18, 4],
        [1, 4, 5, 1],
        [1, 0, 1, 4],
        [3, 0, 14, 4],
    ]


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


def test_the_persistent_kernel_is_for_long_stretches_alone():
    assert prefill_config(17, 4, 128, 2, 233472, persistent=True) == PERSISTENT
    assert prefill_config(16, 4, 128, 2, 233472, persistent=True) == prefill_config(16, 4, 128, 2, 233472)
