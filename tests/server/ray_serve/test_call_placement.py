from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from engine.core.types import Request, SamplingParams
from engine.server.front_end.routing import MAX_OUTPUT_COST
from engine.server.ray_serve.call_placement import CallPlacement
from engine.server.ray_serve.ray_link import EngineCall

BLOCK = 16
NAMES = ("a", "b", "c")


def call(tokens: Sequence[int] = (1, 2), max_tokens: int = 8, **fields: Any) -> EngineCall:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCall(Request(id="r", prompt=tuple(tokens), params=params, **fields), 1)


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 10_000 + token for token in range(blocks * BLOCK + 1)]


def placement(*names: str) -> CallPlacement:
    made = CallPlacement(BLOCK)
    made.change_replicas(dict.fromkeys(names, 100))
    return made


def place(made: CallPlacement, one: EngineCall, **num_calls: int) -> list[str]:
    return made.place(one, NAMES, num_calls)


def test_calls_with_equal_prompts_meet_and_others_spread() -> None:
    made = placement(*NAMES)
    homes = [place(made, call(prompt(seed, 8)))[0] for seed in range(3)]
    assert sorted(homes) == list(NAMES)
    assert [place(made, call(prompt(seed, 8)))[0] for seed in range(3)] == homes


def test_a_call_costs_its_prompt_until_the_first_token_and_its_output_until_the_end() -> None:
    made = placement("a", "b")
    first = call(prompt(1, 4), max_tokens=10)
    (best, other) = place(made, first)
    assert first.load == 4 * BLOCK + 1 + 10
    first.has_tokens = True
    assert first.load == 10
    assert place(made, call([3] * 11))[0] == other
    first.ended = True
    assert place(made, call([4] * 5))[0] == best


def test_a_replica_without_room_or_that_declined_comes_last_or_not_at_all() -> None:
    made = placement(*NAMES)
    assert "a" not in made.place(call(), ("b", "c"), {})
    one = call()
    one.declined |= {"a", "b"}
    assert place(made, one) == ["c"]
    one.declined.add("c")
    assert sorted(place(made, one)) == list(NAMES)  # all have: try again
    assert sorted(made.place(call(), (), {})) == list(NAMES)  # all are full: the call waits
    assert placement().place(call(), (), {}) == []


def test_calls_of_other_front_ends_count_by_their_number() -> None:
    made = placement("a", "b")
    assert place(made, call(max_tokens=MAX_OUTPUT_COST), a=3)[0] == "b"
    assert place(made, call(), a=3, b=9)[0] == "a"


def test_a_replica_that_has_gone_is_forgotten_and_the_others_keep_their_prefixes() -> None:
    made = placement("a", "b")
    first = call(prompt(1, 8))
    home = place(made, first)[0]
    (other,) = {"a", "b"} - {home}
    made.change_replicas({home: 100, "0": 100})
    first.ended = True
    assert place(made, call(prompt(1, 8)))[0] == home
    made.change_replicas({other: 100, "0": 100})
    made.change_replicas({home: 100, other: 100})
    one = call(prompt(1, 8))
    place(made, one)
    assert one.prompt_cost == 8 * BLOCK + 1


def test_a_call_that_was_sent_elsewhere_counts_there() -> None:
    made = placement("a", "b")
    first = call(prompt(1, 8))
    best, other = place(made, first)
    made.move(first, other)
    assert place(made, call())[0] == best


def test_a_call_that_was_sent_to_a_replica_that_has_gone_counts_nowhere() -> None:
    made = placement("a", "b")
    first = call(prompt(1, 8))
    place(made, first)
    made.change_replicas({"a": 100})
    made.move(first, "b")
    assert first.replica == "b"
    assert made.place(call(), (), {}) == ["a"]


def test_a_cache_key_keeps_its_home_when_other_replicas_come() -> None:
    before = placement("a", "b")
    homes = {key: place(before, call(cache_key=key))[0] for key in map(str, range(20))}
    before.change_replicas(dict.fromkeys(NAMES, 100))
    after = {key: place(before, call(cache_key=key))[0] for key in homes}
    assert all(after[key] in (home, "c") for key, home in homes.items())
    assert set(after.values()) == set(NAMES)


def test_only_the_message_of_a_call_is_sent() -> None:
    one = call()
    assert pickle.loads(pickle.dumps(one)) == one.message
