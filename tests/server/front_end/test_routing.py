"""The router, without any process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings, strategies as st

from engine.core.types import Request, SamplingParams
from engine.server.front_end.routing import (
    MAX_HASHED_IN_ALL,
    MAX_OUTPUT_COST,
    MIN_KEY_ALLOWANCE,
    Placement,
    PrefixIndex,
    Router,
)

BLOCK = 16


def request(prompt: Sequence[int], salt: str = "", **params: Any) -> Request:
    return Request(id="r", prompt=tuple(prompt), params=SamplingParams(**params), salt=salt)


def prompt(seed: int, blocks: int) -> list[int]:
    """Full blocks and one token, different for each seed."""
    return [seed * 10_000 + token for token in range(blocks * BLOCK + 1)]


def chosen_replica(router: Router, tokens: Sequence[int], loads: Sequence[float | None], salt: str = "") -> int:
    return router.place([request(tokens, salt)], loads)[0].replica


def test_a_single_replica_gets_all_requests_and_nothing_is_indexed() -> None:
    router = Router([100], BLOCK)
    first, again = (router.place([request(prompt(1, 4), max_tokens=7)], [5.0])[0] for _ in range(2))
    assert first == again == Placement(0, 4 * BLOCK + 1, 7)


def test_the_least_loaded_replica_is_chosen_without_a_cached_prefix() -> None:
    assert chosen_replica(Router([100] * 3, BLOCK), prompt(1, 2), [30, 10, 20]) == 1
    assert chosen_replica(Router([100] * 3, BLOCK), [1, 2], [30, 20, 10]) == 2


def test_a_cached_prefix_is_preferred_while_it_saves_more_than_the_load_difference() -> None:
    saved = 10 * BLOCK
    for difference, expected in ((saved - 1, 1), (saved, 1), (saved + 1, 0)):
        router = Router([100] * 2, BLOCK)
        assert chosen_replica(router, prompt(1, 10), [1000, 0]) == 1
        assert chosen_replica(router, prompt(1, 10), [0, difference]) == expected


def test_the_longer_cached_prefix_is_preferred() -> None:
    router = Router([100] * 2, BLOCK)
    assert chosen_replica(router, prompt(1, 4), [0, 1000]) == 0
    assert chosen_replica(router, prompt(1, 8), [1000, 0]) == 1
    assert chosen_replica(router, prompt(1, 9), [0, 0]) == 1
    assert router.place([request(prompt(1, 9))], [0, 0])[0].prompt_cost == 1


def test_a_prompt_sent_to_two_replicas_is_indexed_for_both() -> None:
    router = Router([100] * 2, BLOCK)
    for loads in ([0, 10**6], [10**6, 0]):
        chosen_replica(router, prompt(1, 8), loads)
    assert [router.place([request(prompt(1, 8))], loads)[0] for loads in ([0, 1], [1, 0])] == [
        Placement(0, 1, MAX_OUTPUT_COST),
        Placement(1, 1, MAX_OUTPUT_COST),
    ]


def test_prefixes_with_different_salts_are_different() -> None:
    router = Router([100] * 2, BLOCK)
    assert chosen_replica(router, prompt(1, 8), [0, 1000], "a") == 0
    assert chosen_replica(router, prompt(1, 8), [BLOCK, 0], "b") == 1
    assert chosen_replica(router, prompt(1, 8), [BLOCK, 0], "a") == 0


def test_idle_replicas_share_prompts_and_all_routers_agree() -> None:
    routers = [Router([1000] * 4, BLOCK) for _ in range(2)]
    chosen = [[chosen_replica(router, prompt(seed, 3), [0] * 4) for seed in range(200)] for router in routers]
    assert chosen[0] == chosen[1]
    assert min(Counter(chosen[0]).values()) > 25
    assert Counter(chosen_replica(routers[0], [1], [0] * 4) for _ in range(8)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_choices_of_one_prompt_stay_together_and_prompts_spread() -> None:
    requests = [request(prompt(seed, 4), max_tokens=10) for seed in range(6) for _ in range(3)]
    places = Router([100] * 2, BLOCK).place(requests, [0, 0])
    for index in range(0, len(places), 3):
        assert len({place.replica for place in places[index : index + 3]}) == 1
        assert [place.prompt_cost for place in places[index : index + 3]] == [4 * BLOCK + 1, 0, 0]
    assert Counter(place.replica for place in places) == {0: 9, 1: 9}
    assert {place.output_cost for place in places} == {10}


def test_reset_forgets_the_prefixes_of_a_replica() -> None:
    router = Router([100] * 2, BLOCK)
    for seed, loads in ((1, [0, 1000]), (2, [1000, 0])):
        chosen_replica(router, prompt(seed, 8), loads)
    router.reset(1, 100)
    assert [chosen_replica(router, prompt(seed, 8), loads) for seed, loads in ((1, [BLOCK, 0]), (2, [0, BLOCK]))] == [
        0,
        0,
    ]
    router.reset(0, 4)  # with less memory for its cache
    for _ in range(2):
        places = router.place([request(prompt(3, 8))], [0, None])
    assert places[0].prompt_cost == 4 * BLOCK + 1


def test_only_loads_count_without_prefix_caches() -> None:
    router = Router([0, 0], BLOCK)
    assert chosen_replica(router, prompt(1, 50), [0, 1]) == 0
    assert chosen_replica(router, prompt(1, 50), [1, 0]) == 1


def test_prefixes_are_forgotten_oldest_first_from_their_ends() -> None:
    prefixes = PrefixIndex(5)
    old, new = ([b"%d.%d" % (seed, block) for block in range(3)] for seed in range(2))
    prefixes.insert(old)
    prefixes.insert(new)
    assert (prefixes.match(old), prefixes.match(new), len(prefixes)) == (2, 3, 5)
    prefixes.insert(old)
    assert (prefixes.match(old), prefixes.match(new), len(prefixes)) == (3, 2, 5)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(tokens, st.lists(st.none() | st.integers(0, 100), min_size=3, max_size=3)), max_size=20),
    st.integers(0, 8),
)
def test_the_chosen_replica_is_up_and_costs_no_more_than_the_least_loaded(
    sent: list[tuple[list[int], list[float | None]]], blocks: int
) -> None:
    router = Router([blocks] * 3, 4)
    for prompt_tokens, loads in sent:
        open_loads = [load for load in loads if load is not None]
        if not open_loads:
            continue
        (place,) = router.place([request(prompt_tokens)], loads)
        load = loads[place.replica]
        assert load is not None
        assert 1 <= place.prompt_cost <= len(prompt_tokens)
        assert load + place.prompt_cost <= min(open_loads) + len(prompt_tokens)


def test_all_choices_of_a_request_load_the_chosen_replica() -> None:
    requests = [request(prompt(1, 2), max_tokens=50), request(prompt(2, 2), max_tokens=50)]
    first, second = Router([0, 0], BLOCK).place(requests, [0, 100], choices=4)
    assert first == Placement(0, 2 * BLOCK + 1, 50)
    assert second.replica == 1  # the first one's choices add 200 tokens to the other replica's load


def test_many_prompts_have_an_equal_share_of_the_hashed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digests = Router._digests

    def count(self: Router, *arguments: Any) -> list[bytes]:
        found = digests(self, *arguments)
        hashed.append(len(found))
        return found

    monkeypatch.setattr(Router, "_digests", count)
    router = Router([10_000] * 2, BLOCK)
    for num_prompts in (1, 32, 256):
        hashed.clear()
        router.place([request(prompt(seed, 1100)) for seed in range(num_prompts)], [0, 0])
        assert len(set(hashed)) == 1
        assert sum(hashed) <= MAX_HASHED_IN_ALL + num_prompts


def keyed(key: str, seed: int, blocks: int = 4, salt: str = "") -> Request:
    """A request of a prompt of its own with a cache key."""
    return evolve(request(prompt(seed, blocks), salt), cache_key=key)


def homes(router: Router, keys: Sequence[str], loads: Sequence[float | None], salt: str = "") -> list[int]:
    """The replica that each key's request is sent to, each with another prompt."""
    return [router.place([keyed(key, number, salt=salt)], loads)[0].replica for number, key in enumerate(keys)]


KEYS = [f"session {number}" for number in range(200)]


def test_requests_of_a_cache_key_go_to_one_replica_whatever_their_prompts_and_all_routers_agree() -> None:
    first, second = (Router([1000] * 4, BLOCK) for _ in range(2))
    chosen = homes(first, KEYS, [0] * 4)
    assert chosen == homes(second, KEYS, [0] * 4) == homes(first, list(reversed(KEYS)), [0] * 4)[::-1]
    assert min(Counter(chosen).values()) > 25, "keys spread over the replicas"
    assert chosen != homes(first, KEYS, [0] * 4, salt="other tenant")


def test_the_keys_of_a_replica_that_is_down_spread_over_the_others_and_return() -> None:
    router = Router([1000] * 4, BLOCK)
    before = homes(router, KEYS, [0] * 4)
    meanwhile = homes(router, KEYS, [0, None, 0, 0])
    assert all(now == then for now, then in zip(meanwhile, before, strict=True) if then != 1)
    assert {now for now, then in zip(meanwhile, before, strict=True) if then == 1} == {0, 2, 3}
    assert homes(router, KEYS, [0] * 4) == before


@pytest.mark.parametrize("blocks", [4, 1000])
def test_a_home_keeps_its_requests_until_it_has_too_much_more_load_than_another(blocks: int) -> None:
    allowance = max(blocks * BLOCK + 1, MIN_KEY_ALLOWANCE)
    for excess, expected in ((0, True), (allowance, True), (allowance + 1, False)):
        router = Router([100_000] * 3, BLOCK)
        home = router.place([keyed("k", 1, blocks)], [500] * 3)[0].replica
        loads: list[float | None] = [500.0 + excess if replica == home else 500.0 for replica in range(3)]
        assert (router.place([keyed("k", 2, blocks)], loads)[0].replica == home) is expected


def test_beyond_that_the_cost_decides_and_the_key_does_not() -> None:
    router = Router([100_000] * 3, BLOCK)
    home = router.place([keyed("k", 1, 10)], [0] * 3)[0].replica
    loads: list[float | None] = [10.0 ** (1 + (replica - home) % 3) for replica in range(3)]
    loads[home] = 10**5
    assert router.place([keyed("k", 2, 10)], loads)[0].replica == (home + 1) % 3


def test_a_home_is_charged_what_it_must_compute() -> None:
    router = Router([100_000] * 3, BLOCK)
    costs = [router.place([keyed("k", 1, blocks)], [0] * 3)[0].prompt_cost for blocks in (10, 12)]
    assert costs == [10 * BLOCK + 1, 2 * BLOCK + 1]


def test_a_key_has_no_home_without_prefix_caches() -> None:
    router = Router([0, 0], BLOCK)
    assert homes(router, KEYS, [0, 1]) == [0] * len(KEYS)
    assert homes(router, KEYS, [1, 0]) == [1] * len(KEYS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS[:4]), st.integers(1, 300)), max_size=40))
def test_no_replica_has_more_load_than_another_by_more_than_a_request_and_the_allowance(
    sent: list[tuple[str, int]],
) -> None:
    router, loads = Router([10**6] * 3, BLOCK), [0.0] * 3
    for number, (key, blocks) in enumerate(sent):
        one = keyed(key, number, blocks)
        (place,) = router.place([one], loads)
        assert loads[place.replica] <= min(loads) + max(len(one.prompt), MIN_KEY_ALLOWANCE)
        loads[place.replica] += place.prompt_cost + place.output_cost
