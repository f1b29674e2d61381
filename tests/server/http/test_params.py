from __future__ import annotations

from typing import Any

import pytest

from engine.core.config.server import ServerConfig
from engine.core.types import SamplingParams
from engine.server.front_end.errors import ApiError
from engine.server.http import params
from engine.server.http.request_bodies import CompletionBody

LIMITS = ServerConfig(max_n=4, max_logprobs=5, max_stop=2, max_stop_chars=8, max_logit_bias=3)
DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
VOCAB = 100


def sampling_params(**given: Any) -> SamplingParams:
    body = CompletionBody(model="m", prompt="p", **given)
    return params.sampling_params(body, DEFAULTS, LIMITS, VOCAB)


def test_missing_parameters_get_the_models_defaults() -> None:
    assert sampling_params() == DEFAULTS
    assert sampling_params(temperature=0.0) == SamplingParams(temperature=0.0, top_p=0.9, top_k=20)


def test_every_parameter_reaches_sampling_params() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 4,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    converted = sampling_params(**given, stop=["a", "b"], stop_token_ids=[5], logit_bias={6: 1.5})
    assert {name: getattr(converted, name) for name in given} == given
    assert converted.stop == ("a", "b")
    assert converted.stop_token_ids == (5,)
    assert converted.logit_bias == ((6, 1.5),)
    assert sampling_params(stop="a").stop == ("a",)
    assert sampling_params(top_k=-1).top_k == 0


def test_values_that_ask_for_nothing_pass() -> None:
    assert sampling_params(seed=-1, stop="", top_k=-1) == sampling_params(top_k=0)
    assert sampling_params(stop=[]) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.009}, "repetition_penalty"),  # far smaller ones make logits infinite
        ({"seed": -2}, "seed"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": "a" * 9}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "logit_bias"),
    ],
)
def test_refusals_name_the_parameter(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(**given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("n", [0, -1, 5])
def test_n_has_a_limit(n: int) -> None:
    with pytest.raises(ApiError, match="n must be from 1 to 4"):
        params.num_choices(CompletionBody(model="m", prompt="p", n=n), LIMITS)


def tokens_for(given: int | None, default: int | None, prompt: int) -> int | None:
    return params.with_max_tokens(given, "max_tokens", default, DEFAULTS, prompt, max_len=100).max_tokens


def test_max_tokens_default_to_what_the_context_leaves() -> None:
    assert tokens_for(10, 16, 90) == 10
    assert tokens_for(None, 16, 50) == 16
    assert tokens_for(None, 16, 90) == 10
    assert tokens_for(None, None, 90) == 10


@pytest.mark.parametrize(("given", "prompt"), [(11, 90), (None, 100), (None, 101), (1, 100)])
def test_a_request_longer_than_the_context_is_refused(given: int | None, prompt: int) -> None:
    with pytest.raises(ApiError, match="context holds 100 tokens") as caught:
        tokens_for(given, 16, prompt)
    assert caught.value.code == "context_length_exceeded"


def test_a_refusal_of_max_tokens_uses_the_clients_name_for_it() -> None:
    with pytest.raises(ApiError, match=r"^max_completion_tokens must be in") as caught:
        params.with_max_tokens(0, "max_completion_tokens", None, DEFAULTS, 5, max_len=100)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(ApiError, match=r"^max_completion_tokens must be in"):
        params.checked_params({}, DEFAULTS, LIMITS, VOCAB, 0, "max_completion_tokens")
