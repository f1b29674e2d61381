"""Which layers share a cache group, and what contexts then take."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.attention.groups import CacheLayout, divide_layers
from engine.core.attention.state_pool import StatePool
from engine.core.config.tree import CacheConfig, EngineConfig
from engine.core.models.base import KVShape, ModelSpec, StateShape
from engine.core.plugin_host.cache_groups import cache_layout
from engine.core.schedulers.block_kinds import blocks_needed, longest_context
from engine.core.types import FULL, BlockKind


def spec(windows: tuple[int | None, ...], **fields: Any) -> ModelSpec:
    return ModelSpec(
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=32,
        vocab_size=100,
        max_len=131072,
        sliding_windows=windows,
        scale=0.5,
        **fields,
    )


def layout(model: ModelSpec, max_len: int = 131072, ranks: int = 1) -> CacheLayout:
    return cache_layout(model, EngineConfig(), "float32", max_len, "float32", ranks)


GEMMA_3_12B = (*(1024,) * 5, None) * 8


def test_layers_of_one_kind_are_one_group() -> None:
    for windows in ((None,) * 6, (64,) * 6, (64, 64, 64, 200000)):
        found = layout(spec(windows), max_len=64 if 200000 in windows else 131072)
        assert found.one
        assert found.groups[0].layers == tuple(range(len(windows)))


def test_five_windows_to_one_full_layer_are_six_groups_of_equal_size() -> None:
    found = layout(spec(GEMMA_3_12B))
    assert [(kind.name, kind.groups, kind.layers) for kind in found.kinds] == [("full", 1, 8), ("window 1024", 5, 40)]
    assert {len(group.layers) for group in found.groups} == {8}
    assert found.groups[0].layers == tuple(range(5, 48, 6))
    for layer, (group, index) in enumerate(found.places):
        assert found.groups[group].layers[index] == layer
        assert found.groups[group].spec.sliding_windows[index] == GEMMA_3_12B[layer]


def test_a_128_k_context_of_gemma_3_s_shape_takes_one_sixth_and_the_windows() -> None:
    kinds, length = layout(spec(GEMMA_3_12B)).kinds, 131072 // 16
    whole = blocks_needed([FULL], length, 16, 1) * 6
    assert blocks_needed(kinds, length, 16, 1) == length + 5 * 65
    assert blocks_needed(kinds, length, 16, 1) < 0.18 * whole
    assert blocks_needed(kinds, 32, 16, 8192) == 6 * 32, "a short context takes no more than without windows"


@pytest.mark.parametrize(
    ("full", "windows", "size"),
    [(8, 40, 8), (13, 13, 13), (4, 22, 4), (10, 52, 10), (5, 29, 5), (0, 32, 32), (1, 3, 1)],
)
def test_divide_layers_wastes_little(full: int, windows: int, size: int) -> None:
    assert divide_layers({False: [full] if full else [], True: [windows]}) == size
    slots = (-(-full // size) + -(-windows // size)) * size
    assert slots <= 1.13 * (full + windows)


def test_longest_context_is_the_longest_that_the_blocks_hold() -> None:
    kinds = (FULL, BlockKind(name="window 20", window=20, groups=3))
    for num_blocks in range(4, 200, 7):
        longest = longest_context(kinds, num_blocks, 8, 48)
        assert blocks_needed(kinds, longest // 8, 8, 48) <= num_blocks < blocks_needed(kinds, longest // 8 + 1, 8, 48)
    assert longest_context(kinds[1:], 100, 8, 48) > 10**6, "windows alone bound no context"


def test_layers_of_other_shapes_are_groups_that_share_memory_where_their_blocks_are_of_one_size() -> None:
    usual = KVShape(num_heads=4, num_kv_heads=2, head_dim=8)
    wide = KVShape(num_heads=4, num_kv_heads=1, head_dim=16)
    latent = KVShape(num_heads=4, num_kv_heads=1, head_dim=24, value_head_dim=16, latent=True)
    state = StateShape(tensors=(((4, 3), "float32"), ((2, 2), "float16")))
    found = layout(spec((None,) * 5, layer_caches=(usual, wide, latent, usual, state)))
    assert [group.layers for group in found.groups] == [(0,), (3,), (1,), (2,)], "one layer of each shape per block"
    assert [group.layers for group in found.states] == [(4,)]
    assert found.state_bytes(max_running=1) == 2 * (4 * 3 * 4 + 2 * 2 * 2)
    assert found.bytes_per_block == 16 * 4 * (32 + 24)
    pools = found.make_pools(3, "cpu")
    assert len({pool.keys[0].data_ptr() for pool in pools[:3]}) == 1
    assert pools[2].keys[0].shape == (4, 16, 1, 16)
    assert pools[3].values[0].shape == (4, 16, 1, 16)
    assert pools[3].values[0].data_ptr() == pools[3].keys[0].data_ptr() != pools[0].keys[0].data_ptr()


def resident() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_states_take_no_memory_on_a_cpu_until_they_are_written() -> None:
    tensors, max_running = (((2**16,), "float32"), ((3, 2**10), "bfloat16")), 500
    before = resident()
    pool = StatePool(tensors, 2, max_running, "cpu")
    assert resident() - before < 2 * max_running * StatePool.bytes_per_sequence(tensors) / 2
    assert [tensor.shape for tensor in pool.layers[1]] == [(501, 2**16), (501, 3, 2**10)]
    assert [tensor.dtype for tensor in pool.layers[1]] == [torch.float32, torch.bfloat16]
    assert not pool.layers[0][0][:2].any()


def test_pools_of_windows_take_no_memory_on_a_cpu_until_they_are_written() -> None:
    found, num_blocks = layout(spec((8, None))), 2**17
    before = resident()
    pools = found.make_pools(num_blocks, "cpu")
    assert resident() - before < found.bytes_per_block * num_blocks / 2
    assert not pools[0].keys[0][:100].any()


def test_ranks_share_heads_and_states_but_not_latent_keys() -> None:
    latent = KVShape(num_heads=4, num_kv_heads=1, head_dim=24, value_head_dim=16, latent=True)
    state = StateShape(tensors=(((4, 3), "float32"), ((5,), "int64"), ((), "bool")), replicated=(False, True, True))
    caches = (KVShape(num_heads=4, num_kv_heads=2, head_dim=8), latent, state)
    found = layout(spec((None,) * 3, layer_caches=caches), ranks=2)
    heads = [(group.spec.num_heads, group.spec.num_kv_heads) for group in found.groups]
    assert heads == [(2, 1), (2, 1)]
    assert found.states[0].tensors == (((2, 3), "float32"), ((5,), "int64"), ((), "bool"))


def test_groups_have_the_sinks_of_their_layers() -> None:
    found = layout(evolve(spec((8, None, 8, None)), sinks=(True, False, False, False)))
    assert [group.spec.sinks for group in found.groups] == [(), (True, False)]


def test_blocks_have_the_configured_number_of_tokens() -> None:
    config = EngineConfig(cache=CacheConfig(block_size=64))
    found = cache_layout(spec((None, 8)), config, "float32", 512, "float32")
    assert {group.spec.block_size for group in found.groups} == {64}
