"""The metrics of the KV cache equal those of a brute-force replay of all that has happened to its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.histogram import RESIDENCY_BOUNDS
from engine.core.schedulers.cache_metrics import MAX_TENANTS, CacheMetrics, tenant_label
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.prefix_tree import PrefixTree
from engine.core.types import FULL, BlockKind, CacheStats, EngineStats, HistogramCounts

from .cache_load import BLOCK_SIZE, LAYOUTS, CacheLoad, Clock, Record

OPERATIONS = 100
LOADS = given(
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(4, 30),
    steps_ahead=st.integers(0, 1),
)
LIMITS = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def histogram(values: Sequence[float]) -> HistogramCounts:
    """A histogram, by its definition; empty without values."""
    if not values:
        return HistogramCounts()
    bounds = (-1.0, *RESIDENCY_BOUNDS, float("inf"))
    return HistogramCounts(
        tuple(sum(low < value <= high for value in values) for low, high in pairwise(bounds)), sum(values)
    )


class Replay:
    """The histograms of a record, found by searching it from the start for each event.

    drawn: for each allocation, in order, whether it is sampled.
    """

    def __init__(self, record: Sequence[Record], drawn: Iterator[bool]) -> None:
        self.record = record
        self.sampled = {
            number: next(drawn) for number, event in enumerate(record) if event.what == "allocated"
        }  # by place in the record
        self.lifetime: list[float] = []
        self.idle: list[float] = []
        self.gaps: list[float] = []
        self.ages: list[float] = []
        for number, event in enumerate(record):
            begin = self.allocation(number)
            if event.what == "evicted" and self.sampled[begin]:
                born = record[begin].time
                reuses = [
                    other.time for other in record[begin:number] if (other.what, other.entry) == ("reused", event.entry)
                ]
                self.lifetime.append(event.time - born)
                self.idle.append(event.time - max([born, *reuses]))
                self.gaps += [later - earlier for earlier, later in pairwise(reuses[-4:])]
            elif event.what == "reused" and self.sampled[begin]:
                self.ages.append(event.time - record[begin].time)

    def allocation(self, number: int) -> int:
        """Place in the record of the latest allocation of the entry of an event."""
        entry = self.record[number].entry
        return max(
            at
            for at, other in enumerate(self.record[: number + 1])
            if (other.what, other.entry) == ("allocated", entry)
        )


def check_histograms(load: CacheLoad, stats: CacheStats, drawn: Iterator[bool]) -> Replay:
    replay = Replay(load.record, drawn)
    assert stats.lifetime == histogram(replay.lifetime)
    assert stats.idle_before_evict == histogram(replay.idle)
    assert stats.reuse_gap == histogram(replay.gaps)
    assert stats.hit_age == histogram(replay.ages)
    return replay


def cache_stats(load: CacheLoad) -> tuple[EngineStats, CacheStats]:
    stats = load.scheduler.stats()
    assert stats.cache is not None
    return stats, stats.cache


@LIMITS
@LOADS
def test_cache_metrics_equal_a_replay_when_all_blocks_are_sampled(
    layout: str, seed: int, num_blocks: int, steps_ahead: int
) -> None:
    clock, kinds = Clock(), LAYOUTS[layout]
    metrics = CacheMetrics(kinds, sample=1.0, clock=clock)
    load = CacheLoad(kinds, seed, num_blocks=num_blocks, metrics=metrics, clock=clock, steps_ahead=steps_ahead)
    for number, _ in enumerate(load.run(OPERATIONS)):
        stats, measured = cache_stats(load)
        assert measured.unfilled_slots == load.unfilled_slots()
        if number % 4 == 0:
            assert measured.unreachable_slots == load.unreachable_slots()
        assert measured.total_slots == stats.blocks_total * BLOCK_SIZE
        tenants = {label: (queries, hits) for label, queries, hits in measured.tenants}
        for salt in {state.request.salt for state in load.states if state.scheduled_at is not None}:
            mine = [state for state in load.states if state.request.salt == salt]
            asked = sum(
                state.prompt_len
                for state in mine
                if state.scheduled_at is not None and state.params.prompt_logprobs is None
            )
            assert tenants.pop(tenant_label(salt), (0, 0)) == (asked, sum(state.cached_tokens for state in mine))
        assert not tenants
        assert sum(hits for _, _, hits in measured.tenants) == stats.prefix_hits
        assert sum(queries for _, queries, _ in measured.tenants) == stats.prefix_queries
    check_histograms(load, cache_stats(load)[1], iter(lambda: True, False))


@LIMITS
@LOADS
def test_cache_metrics_equal_a_replay_of_the_sampled_blocks_when_some_are(
    layout: str, seed: int, num_blocks: int, steps_ahead: int
) -> None:
    clock, kinds, sample = Clock(), LAYOUTS[layout], 0.3
    metrics = CacheMetrics(kinds, sample=sample, seed=seed, clock=clock)
    load = CacheLoad(kinds, seed, num_blocks=num_blocks, metrics=metrics, clock=clock, steps_ahead=steps_ahead)
    for _ in load.run(OPERATIONS):
        pass
    draws = Random(seed)
    check_histograms(load, cache_stats(load)[1], (draws.random() < sample for _ in iter(int, 1)))


def test_replayed_loads_evict_reuse_preempt_and_lose_blocks() -> None:
    """The loads of the tests above contain all that they are about."""
    evicted = reused = preempted = lost = gaps = 0
    for seed, kinds in enumerate(LAYOUTS.values()):
        clock = Clock()
        metrics = CacheMetrics(kinds, sample=1.0, clock=clock)
        load = CacheLoad(kinds, seed, num_blocks=8, metrics=metrics, clock=clock)
        for _ in load.run(3 * OPERATIONS):
            lost += cache_stats(load)[1].unreachable_slots
        stats, measured = cache_stats(load)
        evicted += sum(measured.lifetime.counts)
        reused += sum(measured.hit_age.counts)
        gaps += sum(measured.reuse_gap.counts)
        preempted += stats.preemptions
    assert min(evicted, reused, preempted, lost, gaps) > 5, (evicted, reused, preempted, lost, gaps)


def test_cache_metrics_are_absent_when_off() -> None:
    load = CacheLoad((FULL,), 0, num_blocks=9)
    for _ in load.run(OPERATIONS):
        assert load.scheduler.stats().cache is None


def test_only_unfilled_slots_are_counted_without_prefix_caching() -> None:
    metrics = CacheMetrics(sample=1.0)
    load = CacheLoad((FULL,), 1, num_blocks=9, metrics=metrics, prefix_caching=False)
    seen = 0
    for _ in load.run(OPERATIONS):
        _, measured = cache_stats(load)
        assert measured.unfilled_slots == load.unfilled_slots()
        seen += measured.unfilled_slots
        assert (measured.tenants, measured.unreachable_slots) == ((), 0)
        assert measured.lifetime == measured.hit_age == histogram([])
    assert seen


def test_sampling_is_repeatable_and_near_its_share() -> None:
    def sampled(seed: int) -> list[int]:
        metrics = CacheMetrics(sample=0.01, seed=seed)
        metrics.allocated(range(10_000))
        return list(metrics._records)

    assert sampled(1) == sampled(1) != sampled(2)
    assert 60 < len(sampled(1)) < 140


def test_tenants_beyond_the_limit_share_a_label() -> None:
    metrics = CacheMetrics(sample=0.0)
    for number in range(MAX_TENANTS + 9):
        metrics.count_queries(f"secret {number}", 10)
        metrics.count_hits(f"secret {number}", 4)
    tenants = metrics.stats(unfilled_slots=0, unreachable_slots=0, total_slots=0).tenants
    assert len({label for label, _, _ in tenants}) == MAX_TENANTS + 1
    assert tenants[0] == (tenant_label("secret 0"), 10, 4)
    assert tenants[-1] == ("other", 90, 36)
    assert not any("secret" in label for label, _, _ in tenants)


@pytest.mark.parametrize("salt", ["a", "tenant", "x" * 256])
def test_tenant_label_is_short_and_does_not_contain_the_salt(salt: str) -> None:
    assert len(tenant_label(salt)) == 8
    assert set(tenant_label(salt)) <= set("0123456789abcdef")


def test_tenant_without_salt_is_unsalted() -> None:
    assert tenant_label("") == "unsalted"


def test_prefix_tree_knows_what_is_behind_a_missing_block() -> None:
    digests = HashChain(1).first(range(5), 5)
    tree = PrefixTree()
    tree.add((0, 1), digests[:2], None)
    tree.add((2, 3, 4), digests[2:], digests[1])
    tree.add((9,), (b"branch",), digests[0])
    tree.remove((digests[1],))
    assert tree.unreachable == {2, 3, 4}
    tree.remove((digests[3],))
    assert tree.unreachable == {2, 4}
    tree.add((7,), (digests[1],), digests[0])
    assert tree.unreachable == {4}
    tree.add((8,), (digests[3],), digests[2])
    assert tree.unreachable == set()
    tree.remove((digests[0],))
    assert tree.unreachable == {2, 4, 7, 8, 9}
    tree.clear()
    assert tree.unreachable == set()
    assert not tree._orphans


def test_prefix_tree_forgets_all_once_every_block_is_removed() -> None:
    random, tree = Random(3), PrefixTree()
    digests = {bytes([number]): bytes([(number - 1) // 2]) if number else None for number in range(40)}
    order = list(digests)
    for _ in range(20):
        random.shuffle(order)
        for digest in order:
            tree.add((digest[0],), (digest,), digests[digest])
        assert tree.unreachable == set()
        random.shuffle(order)
        for digest in order:
            tree.remove((digest,))
        held = (tree.unreachable, tree._entries, tree._parents, tree._children, tree._orphans)
        assert not any(held)


def test_prefix_tree_equals_a_search_after_any_order_of_runs() -> None:
    random, tree = Random(5), PrefixTree()
    paths = [bytes(random.choices(b"ab", k=random.randint(1, 5))) for _ in range(6)]  # a digest is the path to a block
    entries: dict[bytes, int] = {}
    free, met = list(range(200)), 0
    for _ in range(3000):
        path = random.choice(paths)
        begin = random.choice((0, random.randint(0, len(path) - 1)))
        run = [path[: end + 1] for end in range(begin, random.randint(begin + 1, len(path)))]
        if random.random() < 0.6:
            if not any(digest in entries for digest in run):
                entries |= {digest: free.pop() for digest in run}
                tree.add([entries[digest] for digest in run], run, path[:begin] or None)
        else:
            left = [digest for digest in reversed(run) if digest in entries]
            tree.remove(left)
            free += [entries.pop(digest) for digest in left]
        lost = {
            entry
            for digest, entry in entries.items()
            if not all(digest[: end + 1] in entries for end in range(len(digest)))
        }
        assert tree.unreachable == lost
        met += bool(lost)
    assert 300 < met < 2700


def test_windows_count_no_unreachable_blocks() -> None:
    kinds = (BlockKind(name="window 4", window=4),)
    assert list(CacheMetrics(kinds, sample=1.0).unreachable()) == []
    assert [groups for groups, _ in islice(CacheMetrics((FULL, *kinds), sample=1.0).unreachable(), 2)] == [1]
