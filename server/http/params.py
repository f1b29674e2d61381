"""Converts a request's parameters to SamplingParams and checks the server's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from engine.core.config import ServerConfig
from engine.core.errors import InvalidRequestError
from engine.core.types import SamplingParams
from engine.server.http.errors import invalid
from engine.server.http.request_bodies import Body
from engine.server.http.structured_output import requested_grammar

SAME_NAMES = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)
"""Parameters with the same name and meaning in the request and in SamplingParams."""
CONVERTED = ("stop", "stop_token_ids", "logit_bias")
"""Parameters with the same name, whose values are converted: a text or a list, a list, an object."""
RANDOM_SEED = -1
"""A seed that asks for a random one, as leaving it out does."""
MAX_LOGIT_BIAS = 100.0
"""Maximum absolute value in logit_bias, as at OpenAI. The engine itself accepts any finite bias."""


def sampling_params(body: Body, defaults: SamplingParams, limits: ServerConfig, vocab_size: int) -> SamplingParams:
    """All sampling parameters except logprobs. Raises ApiError naming a parameter out of range."""
    check_length(body.cache_salt, limits, "cache_salt")
    check_length(body.prompt_cache_key, limits, "prompt_cache_key")
    params = checked_params(given_params(body), defaults, limits, vocab_size, body.max_tokens)
    grammar = requested_grammar(body)
    return params if grammar is None else evolve(params, grammar=grammar)


def given_params(body: Body) -> dict[str, Any]:
    """The parameters of a request that `checked_params` takes, as the client gave them."""
    return {name: getattr(body, name) for name in (*SAME_NAMES, *CONVERTED)}


def checked_params(
    given: Mapping[str, Any],
    defaults: SamplingParams,
    limits: ServerConfig,
    vocab_size: int,
    max_tokens: int | None = None,
    max_tokens_name: str = "max_tokens",
) -> SamplingParams:
    """`defaults` with the parameters that are given, by the names of SAME_NAMES and CONVERTED; None: not given.

    max_tokens: as given; `with_max_tokens` compares it with the context. max_tokens_name: name under which the client
    gave the value. Raises ApiError naming a parameter out of range.
    """
    changes = {name: value for name in SAME_NAMES if (value := given.get(name)) is not None}
    if changes.get("seed") == RANDOM_SEED:
        changes["seed"] = None
    if (stop := given.get("stop")) is not None:
        changes["stop"] = _stop(stop, limits)
    if (tokens := given.get("stop_token_ids")) is not None:
        changes["stop_token_ids"] = _token_ids(tokens, vocab_size, limits)
    if (bias := given.get("logit_bias")) is not None:
        changes["logit_bias"] = _logit_bias(bias, vocab_size, limits)
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    return evolve(defaults, max_tokens_name, **changes)


def evolve(params: SamplingParams, max_tokens_name: str = "max_tokens", **changes: object) -> SamplingParams:
    """`params` with changes. Raises ApiError if SamplingParams refuses them.

    max_tokens_name: name under which the client gave max_tokens.
    """
    try:
        return attrs.evolve(params, **changes) if changes else params  # type: ignore[arg-type]
    except InvalidRequestError as error:
        if error.parameter == "max_tokens":
            raise invalid(str(error).replace("max_tokens", max_tokens_name, 1), max_tokens_name) from None
        raise invalid(str(error), error.parameter) from None


def num_choices(body: Body, limits: ServerConfig) -> int:
    """The number of choices per prompt. Raises ApiError."""
    n = 1 if body.n is None else body.n
    check_num_choices(n, limits)
    return n


def check_num_choices(n: int, limits: ServerConfig) -> None:
    """Raise ApiError unless each prompt may have `n` choices."""
    if not 1 <= n <= limits.max_n:
        raise invalid(f"n must be from 1 to {limits.max_n} (server.max_n), not {n}", "n")


def check_length(text: str | None, limits: ServerConfig, param: str) -> None:
    """Raise ApiError for a cache_salt or prompt_cache_key that is too long."""
    if text is not None and len(text) > limits.max_salt_chars:
        raise invalid(
            f"{param} has {len(text)} characters; at most {limits.max_salt_chars} (server.max_salt_chars) are "
            "allowed, so send a hash of it",
            param,
        )


def check_stream_options(body: Body) -> None:
    """Raise ApiError if stream_options is given without stream, or one of the options without another it needs."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is allowed only with stream: true", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise invalid(
            "stream_options.continuous_usage_stats is allowed only with include_usage: true",
            "stream_options.continuous_usage_stats",
        )


def check_logprobs(count: int, limits: ServerConfig, param: str) -> None:
    """Raise ApiError unless the `count` most likely tokens can be reported."""
    if not 0 <= count <= limits.max_logprobs:
        raise invalid(f"{param} must be from 0 to {limits.max_logprobs} (server.max_logprobs), not {count}", param)


def with_max_tokens(
    given: int | None, param: str, default: int | None, params: SamplingParams, prompt_len: int, max_len: int
) -> SamplingParams:
    """`params` with max_tokens set: as given, else `default` (None: unlimited) within what the context has left.

    param: name under which the client gave the value. max_len: context length, tokens.
    Raises ApiError when prompt and output exceed the context.
    """
    check_room(prompt_len, max_len, given or 0, param)
    room = max_len - prompt_len
    found = min(room, default or room) if given is None else given
    return params if params.max_tokens == found else evolve(params, param, max_tokens=found)


def check_room(prompt_len: int, max_len: int, output_len: int = 0, param: str | None = None) -> None:
    """Raise ApiError unless the context holds the prompt and at least one token, or the `output_len` requested."""
    room = max_len - prompt_len
    if room < max(1, output_len):
        requested = f" and {output_len} for the output ({param})" if output_len else ""
        raise invalid(
            f"this model's context holds {max_len} tokens, but the request has {prompt_len} in the prompt{requested}; "
            "shorten one of them",
            param if room >= 1 else None,
            "context_length_exceeded",
        )


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError unless all token ids are in the model's vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise invalid(f"{param} has token id {wrong}; this model's token ids are 0 to {vocab_size - 1}", param)


def _stop(stop: str | list[str], limits: ServerConfig) -> tuple[str, ...]:
    if stop == "":  # asks for nothing
        return ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > limits.max_stop:
        raise invalid(f"stop has {len(texts)} strings; at most {limits.max_stop} (server.max_stop) are allowed", "stop")
    if any(len(text) > limits.max_stop_chars for text in texts):
        raise invalid(
            f"a stop string is longer than {limits.max_stop_chars} characters (server.max_stop_chars)", "stop"
        )
    return texts


def _token_ids(tokens: list[int], vocab_size: int, limits: ServerConfig) -> tuple[int, ...]:
    if len(tokens) > limits.max_stop:
        raise invalid(
            f"stop_token_ids has {len(tokens)} tokens; at most {limits.max_stop} (server.max_stop) are allowed",
            "stop_token_ids",
        )
    check_tokens(tokens, vocab_size, "stop_token_ids")
    return tuple(tokens)


def _logit_bias(bias: dict[int, float], vocab_size: int, limits: ServerConfig) -> tuple[tuple[int, float], ...]:
    if len(bias) > limits.max_logit_bias:
        raise invalid(
            f"logit_bias has {len(bias)} tokens; at most {limits.max_logit_bias} (server.max_logit_bias) are allowed",
            "logit_bias",
        )
    check_tokens(list(bias), vocab_size, "logit_bias")
    if any(not abs(value) <= MAX_LOGIT_BIAS for value in bias.values()):  # also refuses NaN
        raise invalid(
            f"a logit_bias value is out of range; use {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}", "logit_bias"
        )
    return tuple(bias.items())
