"""A router that only follows events knows exactly what is in the prefix cache, whatever happens to it."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from engine.core.kv_events.recorder import Cleared, EventRecorder, Removed, Stored
from engine.core.kv_events.wire import BatchEncoder, block_hash
from engine.core.schedulers.hash_chain import HashChain
from engine.core.types import FULL
from tests.core.schedulers.cache_load import BLOCK_SIZE, LAYOUTS, SALTS, CacheLoad

from .router import Router


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(4, 30),
    arrays=st.booleans(),
)
def test_router_knows_what_is_cached_after_any_load(layout: str, seed: int, num_blocks: int, arrays: bool) -> None:
    kinds = LAYOUTS[layout]
    recorder = EventRecorder(BLOCK_SIZE)
    encoder = BatchEncoder(kinds, BLOCK_SIZE, rank=0, arrays=arrays)
    load, router = CacheLoad(kinds, seed, num_blocks=num_blocks, observers=[recorder]), Router()
    for _ in load.run(100):
        router.apply(encoder.encode(load.clock.now, recorder.take()))
        assert router.known() == {(kind, block_hash(digest)) for kind, digest in load.indexed()}
        if kinds != (FULL,):
            continue
        prompt = load.states[0].tokens if load.states else [0, 1]
        tokens = [*prompt[: load.random.randint(1, len(prompt))], *load.random.choices((0, 1), k=5)]
        salt = load.random.choice(SALTS)
        chain = HashChain(BLOCK_SIZE, salt)
        found = router.prefix(tokens[:-1], BLOCK_SIZE, salt)
        assert len(found) == len(load.blocks.lookup(tokens, chain))
        assert found == [block_hash(digest) for digest in chain.first(tokens, len(found))]


def test_consecutive_blocks_of_a_sequence_are_one_change() -> None:
    recorder, tokens = EventRecorder(2), [5, 6, 7, 8, 9, 10]
    chain = HashChain(2, "salt")
    digests = chain.first(tokens, 3)
    for index in (0, 1):
        recorder.stored(0, (index,), tokens, chain, index)
    recorder.stored(1, (9,), tokens, chain, 2)
    recorder.removed(0, (digests[1], digests[0]))
    recorder.removed(1, (digests[2],))
    recorder.cleared()
    stored, other, *rest = recorder.take()
    assert isinstance(stored, Stored)
    assert (stored.kind, stored.parent, stored.salt, stored.digests) == (0, None, "salt", digests[:2])
    assert isinstance(other, Stored)
    assert (other.kind, other.parent, other.digests) == (1, digests[1], digests[2:])
    assert rest == [Removed(0, [digests[1], digests[0]]), Removed(1, [digests[2]]), Cleared()]
    assert recorder.take() == []
