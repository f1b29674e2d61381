"""Digests of blocks, with and without those of earlier sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.schedulers import hash_chain
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.grouped_block_manager import GroupedBlockManager
from engine.core.schedulers.growing_tokens import GrowingTokens
from engine.core.schedulers.hash_chain import RUN, DigestCache, HashChain
from engine.core.tokens import Tokens
from engine.core.types import FULL, BlockKind

SIZE = 4


def digests(tokens: list[int], salt: str = "", cache: DigestCache | None = None) -> list[bytes]:
    return HashChain(SIZE, salt, cache).first(tokens, len(tokens) // SIZE)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 3), st.sampled_from(["", "a"])), min_size=1, max_size=6),
    st.sampled_from([0, RUN, 3 * RUN, 100 * RUN]),
)
def test_kept_digests_are_those_that_would_be_computed(sent: list[tuple[int, int, str]], blocks: int) -> None:
    cache = DigestCache(blocks)
    for length, changed, salt in sent:
        tokens = list(range(length))
        if changed < length:
            tokens[changed * length // 4] = 7777
        assert digests(tokens, salt, cache) == digests(tokens, salt)
        assert len(cache) <= blocks // RUN


def test_digests_do_not_depend_on_how_far_they_are_computed_at_a_time() -> None:
    tokens = list(range(SIZE * (2 * RUN + 9)))
    chain, cache = HashChain(SIZE), DigestCache(10 * RUN)
    one_by_one = [chain.digest(tokens, block) for block in range(len(tokens) // SIZE)]
    for at in (1, RUN - 1, RUN, RUN + 1, 2 * RUN):
        partly = HashChain(SIZE, cache=cache)
        assert partly.first(tokens, at) == one_by_one[:at]
        assert partly.first(Tokens(tokens), len(one_by_one)) == one_by_one
        assert len(partly) == len(one_by_one)


@settings(deadline=None)
@given(st.integers(0, 3 * SIZE), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5 * SIZE))
def test_a_sequence_that_decodes_has_the_digests_of_its_tokens(prompt_len: int, output: list[int]) -> None:
    tokens, chain = GrowingTokens(Tokens(range(prompt_len))), HashChain(SIZE)
    found: list[bytes] = []
    for token in output:
        tokens.tail.append(token)
        found += [chain.digest(tokens, block) for block in range(len(found), len(tokens) // SIZE)]
    if output:
        assert found == digests([*range(prompt_len), *output])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_digests_differ_where_anything_before_differs(first: list[int], second: list[int]) -> None:
    for block in range(2):
        end = (block + 1) * SIZE
        assert (digests(first)[block] == digests(second)[block]) == (first[:end] == second[:end])
    assert not set(digests(first, "a")) & set(digests(first, "b"))


def test_a_prompt_that_comes_again_is_hashed_only_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    compute = hash_chain._digests
    monkeypatch.setattr(
        hash_chain,
        "_digests",
        lambda before, tokens, size: hashed.append(len(tokens) // size) or compute(before, tokens, size),
    )
    cache = DigestCache(8 * RUN)
    tokens = list(range(SIZE * (3 * RUN + 5)))
    digests(tokens, "", cache)
    assert sum(hashed) == 3 * RUN + 5
    hashed.clear()
    digests(tokens + list(range(SIZE * 3)), "", cache)
    assert sum(hashed) == 8, "the blocks of the run that was not full"
    hashed.clear()
    digests(tokens, "other", cache)
    assert sum(hashed) == 3 * RUN + 5


def test_the_least_recently_used_run_is_forgotten() -> None:
    cache = DigestCache(2 * RUN)
    first, second, third = ([seed] * SIZE * RUN for seed in range(3))
    for tokens in (first, second, first, third):
        digests(tokens, "", cache)
    kept = {key[1] for key in cache._runs}
    assert kept == {bytes(Tokens(first).pack()), bytes(Tokens(third).pack())}


@pytest.mark.parametrize(
    "kinds", [(FULL,), (FULL, BlockKind(name="window", window=8)), (BlockKind(name="w", window=8),)]
)
def test_block_managers_keep_the_digests_that_lookups_compute(kinds: tuple[BlockKind, ...]) -> None:
    manager = (
        BlockManager(4 * RUN, SIZE) if kinds == (FULL,) else GroupedBlockManager(4 * RUN, SIZE, kinds, max_chunk=64)
    )
    manager.lookup(range(SIZE * 3 * RUN + 1), manager.chain(""))
    assert len(manager._digest_cache) == 3
