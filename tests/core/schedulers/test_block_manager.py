from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import attrs
import pytest

from engine.core.attention.base import AttentionSpec
from engine.core.attention.kv_pool import KVPool
from engine.core.quant.float8 import UNSCALED, KVScales
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.grouped_block_manager import GroupedBlockManager
from engine.core.schedulers.hash_chain import HashChain
from engine.core.types import FULL, BlockKind

BLOCK_SIZE = 4


def make_manager(num_blocks: int = 8, *, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)


def run_prompt(manager: BlockManager, sequence: int, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate a sequence with its cached prefix and register all its full blocks; returns the cached blocks."""
    chain = HashChain(BLOCK_SIZE, salt)
    cached = manager.lookup(tokens, chain)
    assert manager.allocate(sequence, len(tokens), cached) is not None
    manager.register(sequence, tokens, chain, len(tokens))
    manager.check()
    return cached


def test_blocks_are_counted_and_freed() -> None:
    manager = make_manager()
    assert (manager.num_free, manager.num_cached, manager.num_used) == (8, 0, 0)
    table = manager.allocate(1, 9)
    assert table is not None
    assert len(set(table)) == 3
    assert (manager.num_free, manager.num_cached, manager.num_used) == (5, 0, 3)
    manager.check()
    manager.free(1)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (8, 0, 0)
    manager.check()


def test_allocate_is_all_or_nothing() -> None:
    manager = make_manager(2)
    assert manager.allocate(1, 9) is None
    assert manager.num_free == 2
    manager.check()
    assert manager.allocate(1, 8) is not None


def test_extend_adds_blocks_only_across_a_block_boundary_and_all_or_nothing() -> None:
    manager = make_manager(3)
    table = manager.allocate(1, 3)
    assert table is not None
    assert manager.extend(1, 4) == []
    added = manager.extend(1, 5)
    assert added is not None
    assert len(added) == 1
    assert manager.table(1) == (*table, *added)
    assert manager.extend(1, 13) is None
    assert manager.table(1) == (*table, *added)
    assert manager.extend(1, 2) == []
    manager.check()


def test_blocks_that_shrink_frees_are_replaced_at_their_index() -> None:
    manager = make_manager()
    manager.allocate(1, 9)
    manager.extend(1, 17)
    table = manager.table(1)
    manager.updates.clear()
    manager.shrink(1, 12)
    assert manager.table(1) == table[:3]
    assert manager.num_used == 3
    added = manager.extend(1, 13)
    assert added is not None
    assert manager.updates == {1: [-3, *added]}
    manager.updates.clear()
    manager.shrink(1, 13)
    assert manager.updates == {}
    manager.check()


def test_shrink_frees_the_last_blocks_of_every_kind_and_keeps_the_window() -> None:
    kinds = (attrs.evolve(FULL, groups=2), BlockKind(name="window", window=6))
    manager = GroupedBlockManager(40, BLOCK_SIZE, kinds, max_chunk=16)
    manager.allocate(1, 9)
    manager.extend(1, 30, 17)  # 17 tokens are computed; drafts may follow
    before = manager.tables(1)
    manager.updates.clear()
    manager.shrink(1, 18)
    (_, full), (first, window) = manager.tables(1)
    assert first == (17 + 1 - 6) // BLOCK_SIZE
    assert (full, window) == (before[0][1][:10], before[1][1][: 5 - first])
    assert manager.updates == {2: [-5], 3: [-5]}
    added = manager.extend(1, 21)
    assert added is not None
    assert manager.updates == {2: [-5, *added[:2]], 3: [-5, *added[2:]]}
    manager.check()


def test_a_manager_without_kinds_gives_no_blocks_and_room_without_end() -> None:
    manager = GroupedBlockManager(0, BLOCK_SIZE, (), max_chunk=16, prefix_caching=False)
    assert manager.allocate(1, 10**6) == []
    assert manager.capacity(1) == manager.max_tokens > 10**9
    assert (manager.num_held(1), manager.table(1), manager.updates) == (0, (), {})
    manager.check()


def test_lookup_finds_the_longest_equal_prefix() -> None:
    manager = make_manager(16)
    first = list(range(10))
    assert run_prompt(manager, 1, first) == []
    assert run_prompt(manager, 2, [*first[:8], 77, 78]) == list(manager.table(1)[:2])
    assert run_prompt(manager, 3, [*first[:6], 77, 78, 79, 80]) == list(manager.table(1)[:1])
    assert run_prompt(manager, 4, [5, *first[1:]]) == []


def test_lookup_finds_a_prefix_after_its_sequence_is_freed() -> None:
    manager = make_manager()
    run_prompt(manager, 1, list(range(10)))
    table = manager.table(1)
    manager.free(1)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (6, 2, 0)
    assert run_prompt(manager, 2, list(range(10))) == list(table[:2])
    assert manager.num_cached == 0


def test_lookup_does_not_find_a_block_from_the_middle() -> None:
    manager = make_manager()
    run_prompt(manager, 1, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert manager.lookup([2, 2, 2, 2, 3], HashChain(BLOCK_SIZE)) == []


def test_lookup_finds_no_prefix_of_another_salt() -> None:
    manager = make_manager()
    tokens = list(range(9))
    run_prompt(manager, 1, tokens, "alice")
    assert run_prompt(manager, 2, tokens, "bob") == []
    assert run_prompt(manager, 3, tokens, "alice") == list(manager.table(1)[:2])


@pytest.mark.parametrize(("length", "blocks"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_lookup_leaves_out_the_last_token(length: int, blocks: int) -> None:
    manager = make_manager()
    run_prompt(manager, 1, list(range(12)))
    assert len(manager.lookup(list(range(length)), HashChain(BLOCK_SIZE))) == blocks


def test_register_adds_only_computed_full_blocks() -> None:
    manager = make_manager()
    tokens, chain = list(range(12)), HashChain(BLOCK_SIZE)
    manager.allocate(1, 12)
    manager.register(1, tokens, chain, 7)
    assert len(manager.lookup([*tokens, 0], HashChain(BLOCK_SIZE))) == 1
    manager.register(1, tokens, chain, 12)
    assert len(manager.lookup([*tokens, 0], HashChain(BLOCK_SIZE))) == 3
    manager.check()


def test_register_keeps_a_second_block_of_equal_content_private() -> None:
    manager = make_manager()
    tokens = list(range(8))
    for sequence in (1, 2):
        manager.allocate(sequence, 8)
    for sequence in (1, 2):
        manager.register(sequence, tokens, HashChain(BLOCK_SIZE), 8)
    assert manager.lookup([*tokens, 0], HashChain(BLOCK_SIZE)) == list(manager.table(1))
    manager.free(2)
    assert manager.num_cached == 0
    manager.free(1)
    assert manager.num_cached == 2
    manager.check()


def test_shared_block_is_freed_with_its_last_sequence() -> None:
    manager = make_manager(3)
    tokens = list(range(6))
    run_prompt(manager, 1, tokens)
    run_prompt(manager, 2, tokens)
    assert manager.num_used == 3
    manager.free(1)
    assert (manager.num_used, manager.num_cached) == (2, 0)
    manager.free(2)
    assert (manager.num_used, manager.num_cached, manager.num_free) == (0, 1, 2)


def test_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    manager = make_manager(5)
    old, recent = [1] * 9, [2] * 5
    run_prompt(manager, 1, old)
    manager.free(1)
    run_prompt(manager, 2, recent)
    manager.free(2)
    assert (manager.num_free, manager.num_cached) == (2, 3)
    assert manager.allocate(3, 3 * BLOCK_SIZE) is not None
    assert len(manager.lookup(old, HashChain(BLOCK_SIZE))) == 1, "the end of the older prefix is evicted first"
    assert len(manager.lookup(recent, HashChain(BLOCK_SIZE))) == 1
    assert manager.allocate(4, BLOCK_SIZE) is not None
    assert len(manager.lookup(old, HashChain(BLOCK_SIZE))) == 0
    assert len(manager.lookup(recent, HashChain(BLOCK_SIZE))) == 1
    manager.check()


def test_use_makes_a_prefix_the_last_to_be_evicted() -> None:
    manager = make_manager(4)
    first, second = [1] * 5, [2] * 5
    for sequence, tokens in enumerate((first, second, first)):
        run_prompt(manager, sequence, tokens)
        manager.free(sequence)
    assert manager.allocate(9, 3 * BLOCK_SIZE) is not None
    assert len(manager.lookup(first, HashChain(BLOCK_SIZE))) == 1
    assert len(manager.lookup(second, HashChain(BLOCK_SIZE))) == 0


def test_can_allocate_counts_reused_cached_blocks() -> None:
    manager = make_manager(3)
    tokens = list(range(8))
    run_prompt(manager, 1, tokens)
    manager.free(1)
    cached = manager.lookup([*tokens, 0], HashChain(BLOCK_SIZE))
    assert manager.num_available == 3
    assert manager.shortage(12, cached).blocks == 0
    assert manager.can_allocate(12, cached)
    assert manager.shortage(13, cached).blocks == 1
    assert not manager.can_allocate(13, cached)
    assert manager.allocate(2, 13, cached) is None
    manager.check()


def test_shortage_is_smaller_by_the_blocks_that_freed_sequences_would_release() -> None:
    manager = make_manager(5)
    tokens = list(range(8))
    run_prompt(manager, 1, [*tokens, 1])
    run_prompt(manager, 2, [*tokens, 2])
    assert (manager.num_available, manager.num_used) == (1, 4)

    def missing(num_blocks: int, cached: Sequence[int] = (), *, without: Sequence[int]) -> int:
        shortage = manager.shortage(num_blocks * BLOCK_SIZE, cached)
        for sequence in without:
            shortage.release(sequence)
        return shortage.blocks

    assert missing(3, without=[2]) == 1, "the other sequence still uses the prefix"
    assert missing(5, without=[1, 2]) == 0
    assert missing(4, without=[1, 2]) == -1, "a block is left over"
    assert missing(5, manager.table(1)[:2], without=[1, 2]) == 0
    assert missing(6, manager.table(1)[:2], without=[1, 2]) == 1
    assert manager.num_used == 4


def test_no_block_stays_cached_without_prefix_caching() -> None:
    manager = make_manager(prefix_caching=False)
    run_prompt(manager, 1, list(range(10)))
    assert run_prompt(manager, 2, list(range(10))) == []
    manager.free(1)
    manager.free(2)
    assert manager.num_free == 8


def test_hash_chain_follows_a_growing_sequence() -> None:
    tokens = list(range(4))
    chain = HashChain(BLOCK_SIZE)
    first = chain.digest(tokens, 0)
    tokens += [9, 9, 9, 9]
    assert chain.digest(tokens, 0) == first
    assert chain.digest(tokens, 1) == HashChain(BLOCK_SIZE).digest(tokens, 1)
    assert chain.digest(tokens, 1) != HashChain(BLOCK_SIZE).digest([1, *tokens[1:]], 1)


def add_pending(manager: BlockManager, sequence: int, tokens: list[int]) -> list[int]:
    """Allocate a sequence, and index its blocks before they are computed; returns those it shares."""
    chain = HashChain(BLOCK_SIZE)
    shared = manager.lookup(tokens, chain)
    assert manager.allocate(sequence, len(tokens), shared) is not None
    manager.index_pending(sequence, tokens, chain)
    manager.check()
    return shared


def test_index_pending_shares_all_blocks_but_the_last_before_they_are_computed() -> None:
    manager = make_manager(16)
    tokens = list(range(12))
    assert add_pending(manager, 1, tokens) == []
    assert add_pending(manager, 2, tokens) == list(manager.table(1)[:2])
    assert add_pending(manager, 3, [*tokens, 12]) == list(manager.table(1)[:2]), "the last block is private"


def test_claim_goes_on_behind_the_tokens_that_are_claimed() -> None:
    manager = make_manager()
    for sequence in (1, 2):
        add_pending(manager, sequence, list(range(14)))
    assert manager.claim(1, 0, 14, 6) == (0, 6)
    assert manager.claim(2, 0, 14, 3) == (6, 3), "in the middle of a block"
    assert manager.claim(1, 6, 14, 100) == (9, 5)
    assert manager.claim(2, 9, 14, 100) == (12, 2)


def test_claim_ends_before_a_block_that_is_claimed() -> None:
    manager = make_manager(16)
    tokens = list(range(14))
    add_pending(manager, 1, tokens[:9])
    assert manager.allocate(2, 14) is not None  # computes its own copies of the first two blocks, and the third
    assert manager.claim(2, 0, 14, 12) == (0, 12)
    manager.register(2, tokens, HashChain(BLOCK_SIZE), 12)
    assert add_pending(manager, 3, tokens) == [*manager.table(1)[:2], manager.table(2)[2]]
    assert manager.claim(3, 0, 14, 100) == (0, 8)
    assert manager.claim(3, 8, 14, 100) == (12, 2)


def test_returned_claim_is_claimed_again() -> None:
    manager = make_manager()
    for sequence in (1, 2):
        add_pending(manager, sequence, list(range(14)))
    manager.claim(1, 0, 14, 3)
    assert manager.claim(2, 0, 14, 8) == (3, 8)
    manager.return_claim(2, 3, 8)
    assert manager.claim(1, 3, 14, 100) == (3, 11)


def test_free_keeps_pending_blocks_only_while_others_use_them() -> None:
    manager = make_manager()
    for sequence in (1, 2):
        add_pending(manager, sequence, list(range(14)))
    manager.claim(1, 0, 14, 6)
    manager.free(1)
    assert (manager.num_used, manager.num_cached) == (4, 0)
    manager.check()
    assert manager.claim(2, 0, 14, 100) == (6, 8)
    add_pending(manager, 3, list(range(20, 30)))
    manager.free(3)
    assert manager.num_cached == 0, "nothing was computed"
    assert manager.lookup(list(range(20, 30)), HashChain(BLOCK_SIZE)) == []
    manager.free(2)
    assert manager.num_cached == 3
    manager.check()


def test_held_blocks_survive_their_sequence() -> None:
    manager = make_manager()
    tokens = list(range(14))
    add_pending(manager, 1, tokens)
    manager.claim(1, 0, 14, 6)
    found = manager.lookup(tokens, HashChain(BLOCK_SIZE))
    with manager.held(found):
        manager.free(1)
        assert manager.allocate(2, 14, found) is not None
    manager.check()
    assert manager.claim(2, 0, 14, 100) == (6, 8)


def test_check_raises_on_a_leak() -> None:
    manager = make_manager()
    manager.allocate(1, 8)
    manager._tables[1].blocks.pop()
    with pytest.raises(AssertionError):
        manager.check()


def test_scheduler_does_not_import_torch() -> None:
    code = "import sys, engine.core.schedulers.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def make_spec(kv_dtype: str = "float32") -> AttentionSpec:
    return AttentionSpec(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        scale=1.0,
        dtype="float32",
        kv_dtype=kv_dtype,
        block_size=BLOCK_SIZE,
        max_len=64,
        sliding_windows=(None, None),
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_kv_pool_writes_keys_and_values_at_their_slots(kv_dtype: str) -> None:
    import torch

    pool = KVPool(make_spec(kv_dtype), 3, "cpu")
    assert pool.scratch_block == 3
    assert [tuple(keys.shape) for keys in pool.keys] == [(4, BLOCK_SIZE, 2, 8)] * 2
    assert pool.values[1].dtype == getattr(torch, kv_dtype)

    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([2 * BLOCK_SIZE + 1, 0, 3 * BLOCK_SIZE + 3])
    pool.write(1, k, v, slots)
    dtype = pool.keys[1].dtype
    for row, (block, offset) in enumerate([(2, 1), (0, 0), (3, 3)]):
        assert torch.equal(pool.keys[1][block, offset], k[row].to(dtype))
        assert torch.equal(pool.values[1][block, offset], v[row].to(dtype))
    assert pool.keys[1].count_nonzero() == 3 * 2 * 8
    assert pool.keys[0].count_nonzero() == 0


def test_float8_kv_pool_stores_quantized_values() -> None:
    import torch

    scales = (KVScales(key=0.5, value=2.0), KVScales(key=0.01, value=0.02))
    pool = KVPool(make_spec("float8_e4m3fn"), 3, "cpu", scales)
    assert pool.scales == scales
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8).bfloat16()
    k[0, 0, 0], v[1, 0, 0] = 1e30, -torch.inf
    slots = torch.tensor([2 * BLOCK_SIZE + 1, 0, 3 * BLOCK_SIZE + 3])
    for layer, scale in enumerate(scales):
        pool.write(layer, k, v, slots)
        keys, values = (part[layer].float().flatten(0, 1)[slots] for part in (pool.keys, pool.values))
        assert keys[0, 0, 0] == 448
        assert values[1, 0, 0] == -448
        # Half a unit in the last of the 3 mantissa bits; among subnormals, half of 2^-9.
        for quantized, numbers, divisor in ((keys, k, scale.key), (values, v.float(), scale.value)):
            wanted = (numbers / divisor).clamp(-448, 448)
            assert ((quantized - wanted).abs() <= torch.maximum(wanted.abs() * 2**-4, torch.tensor(2**-10))).all()
    assert pool.keys[1].dtype == torch.float8_e4m3fn
    assert pool.keys[1].float().count_nonzero() <= 3 * 2 * 8


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_kv_pool_without_scales_has_scales_of_1(kv_dtype: str) -> None:
    assert KVPool(make_spec(kv_dtype), 1, "cpu").scales == (UNSCALED,) * 2


@pytest.mark.parametrize(("kv_dtype", "count"), [("float32", 2), ("float8_e4m3fn", 1)])
def test_kv_pool_raises_for_scales_it_cannot_use(kv_dtype: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} scales for 2 layers in {kv_dtype}"):
        KVPool(make_spec(kv_dtype), 1, "cpu", (KVScales(key=2.0),) * count)


def test_kv_pool_raises_for_latents_in_float8() -> None:
    with pytest.raises(ValueError, match="a latent cache cannot be in float8_e4m3fn"):
        KVPool(attrs.evolve(make_spec("float8_e4m3fn"), latent=True, value_head_dim=4), 1, "cpu")


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_bytes_per_block_equals_the_size_of_the_tensors(kv_dtype: str) -> None:
    spec = make_spec(kv_dtype)
    pool = KVPool(spec, 6, "cpu")
    taken = sum(tensor.numel() * tensor.element_size() for tensor in (*pool.keys, *pool.values))
    assert taken == 7 * KVPool.bytes_per_block(spec)


def test_unregister_takes_blocks_out_of_the_prefix_cache_used_or_not() -> None:
    manager = make_manager()
    tokens = list(range(11))
    run_prompt(manager, 1, tokens)
    manager.free(1)
    assert len(run_prompt(manager, 2, tokens[:5])) == 1, "of the two blocks one is used again, one only cached"
    manager.unregister(tokens, HashChain(BLOCK_SIZE))
    manager.check()
    assert (manager.num_used, manager.num_cached) == (2, 0)
    assert manager.lookup(tokens, HashChain(BLOCK_SIZE)) == []
    manager.free(2)
    manager.check()
    assert manager.num_free == 8
    assert len(run_prompt(manager, 3, tokens)) == 0
    assert len(run_prompt(manager, 4, tokens)) == 2, "the prefix may be registered again"


def test_unregister_leaves_other_prefixes_and_does_nothing_without_a_cache() -> None:
    manager = make_manager()
    run_prompt(manager, 1, list(range(5)))
    run_prompt(manager, 2, list(range(20, 25)))
    manager.unregister(list(range(5)), HashChain(BLOCK_SIZE))
    assert len(manager.lookup(list(range(20, 25)), HashChain(BLOCK_SIZE))) == 1
    make_manager(prefix_caching=False).unregister(list(range(5)), HashChain(BLOCK_SIZE))
