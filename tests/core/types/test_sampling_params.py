"""SamplingParams: each field accepts its type in the usual forms, and refuses others with a sentence."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from engine.core import SamplingParams
from engine.core.errors import InvalidRequestError
from engine.core.types import MAX_SEED

FIELDS = [field.name for field in attrs.fields(SamplingParams)]
WRONG: list[Any] = ["return", 1, 1.5, True, None, b"x", [1], ["a"], {"a": 1}, {1: 2.0}, object(), [None], [[1, 2.0]]]
"""Each is wrong for most fields."""
RIGHT: dict[str, list[Any]] = {
    "max_tokens": [1, None],
    "min_tokens": [1],
    "temperature": [1, 1.5],
    "top_k": [1],
    "top_p": [1],
    "min_p": [1],
    "repetition_penalty": [1, 1.5],
    "presence_penalty": [1, 1.5],
    "frequency_penalty": [1, 1.5],
    "logit_bias": [{1: 2.0}, [[1, 2.0]]],
    "seed": [1, None],
    "logprobs": [1, None],
    "prompt_logprobs": [1, None],
    "stop": ["return", ["a"]],
    "stop_token_ids": [[1]],
    "ignore_eos": [True],
    "skip_special_tokens": [True],
    "grammar": [None],
}
"""Those of WRONG that the field accepts."""


def is_in(value: Any, values: list[Any]) -> bool:
    return any(value is one or (type(value) is type(one) and value == one) for one in values)


@pytest.mark.parametrize("name", FIELDS)
def test_value_of_a_wrong_type_is_refused_by_name(name: str) -> None:
    for value in WRONG:
        if is_in(value, RIGHT[name]):
            SamplingParams(**{name: value})
            continue
        with pytest.raises(InvalidRequestError, match=name.replace("_", "[_ ]")) as caught:
            SamplingParams(**{name: value})
        assert caught.value.parameter == name, value


def test_one_stop_string_is_not_split_into_letters() -> None:
    assert SamplingParams(stop="return").stop == ("return",)
    assert SamplingParams(stop=["return", "\n"]).stop == ("return", "\n")


def test_lists_and_dicts_become_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1, 2], logit_bias={3: 1, 4: -0.5})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1, 2), ((3, 1), (4, -0.5)))
    assert hash(params) == hash(attrs.evolve(params))


def test_large_whole_number_as_logit_bias_becomes_a_float() -> None:
    [(_, bias)] = SamplingParams(logit_bias={3: 10**30}).logit_bias
    assert bias == 1e30
    assert type(bias) is float


def test_top_k_of_minus_one_is_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_choices_have_different_seeds() -> None:
    seeded = SamplingParams(seed=MAX_SEED)
    assert seeded.of_choice(0) == seeded
    assert [seeded.of_choice(choice).seed for choice in (1, 2)] == [0, 1]
    assert SamplingParams().of_choice(1) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": ["a", "b", 3]}, "stop must be a string or a list of strings, not ['a', 'b', 3]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of token -1 is 1.0; give a finite number"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"logit_bias": {1: "2"}}, "logit_bias of token 1 is '2'"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 is 1000"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias of token 2147483648 is 1.0; give a finite number to a token id"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids must be a list of token ids from 0 on, not [2147483648]"),
        ({"stop": "a\ud800"}, "a stop string has half of a surrogate pair, so it is not Unicode: 'a\\ud800'"),
        ({"stop": ["a", "\udc00"]}, "a stop string has half of a surrogate pair"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids must be a list of token ids from 0 on, not [1, -2]"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list"),
        ({"temperature": math.nan}, "temperature must be in [0, 100], not nan"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number, not 2.0"),
        ({"max_tokens": 0}, "max_tokens must be in [1, 2147483648], not 0"),
        ({"top_k": -2}, "top_k must be in [0, 2147483648], not -2"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens (3) is greater than max_tokens (2)"),
    ],
)
def test_refusals_say_what_is_wrong(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**given)
    assert said in str(caught.value)


def test_refusals_do_not_repeat_long_values() -> None:
    for name in FIELDS:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{name: ["x" * 1000, 2.5] * 1000})
        assert len(str(caught.value)) < 300
