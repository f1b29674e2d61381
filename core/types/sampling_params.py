"""SamplingParams: how to sample one request's tokens, and the checks of each field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from attrs import evolve, field, frozen

from engine.core.errors import InvalidRequestError
from engine.core.grammars.grammar import Grammar
from engine.core.unicode import is_unicode

MAX_SEED = 2**63 - 1
MAX_TOKEN = 2**31 - 1
"""Largest token id: token ids are int32 (core/tokens.py)."""

GREEDY_BELOW_TEMPERATURE = 1e-5
"""At lower temperatures float32 probabilities leave no token but the most likely one."""


def _number(low: float, high: float, *, low_open: bool = False, whole: bool = False) -> Any:
    """An attrs validator: a number in [low, high], or (low, high] with `low_open`, or None if that is the default."""
    kind, kinds = ("a whole number", int) if whole else ("a number", (int, float))

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value is None and attribute.default is None:
            return
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidRequestError(f"{attribute.name} must be {kind}, not {shortened(value)}", attribute.name)
        above = value > low if low_open else value >= low
        if not (above and value <= high):
            left = "(" if low_open else "["
            raise InvalidRequestError(
                f"{attribute.name} must be in {left}{low}, {high}], not {shortened(value)}", attribute.name
            )

    return check


def _flag(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: True or False."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{attribute.name} must be True or False, not {shortened(value)}", attribute.name)


def _stop_strings(value: Any) -> tuple[str, ...]:
    """An attrs converter: one string, or several. Raises InvalidRequestError for anything else, and for ""."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"stop must be a string or a list of strings, not {shortened(value)}", "stop")
    if not all(texts):
        raise InvalidRequestError("a stop string is empty", "stop")
    if not all(map(is_unicode, texts)):
        raise InvalidRequestError(
            f"a stop string has half of a surrogate pair, so it is not Unicode: {shortened(value)}", "stop"
        )
    return tuple(texts)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    """An attrs converter: token ids. Raises InvalidRequestError for anything else."""
    if not isinstance(value, (tuple, list)) or not all(_is_token(token) for token in value):
        raise InvalidRequestError(
            f"stop_token_ids must be a list of token ids from 0 on, not {shortened(value)}", "stop_token_ids"
        )
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An attrs converter: (token, bias) pairs, or a dict. Raises InvalidRequestError for anything else."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
    ):
        raise InvalidRequestError(
            f"logit_bias must be a dict of token ids to numbers, or a list of such pairs, not {shortened(value)}",
            "logit_bias",
        )
    found = []
    for token, bias in pairs:
        number = _finite(bias)
        if number is None or not _is_token(token):
            raise InvalidRequestError(
                f"logit_bias of token {shortened(token)} is {shortened(bias)}; give a finite number to a token id from"
                f" 0 to {MAX_TOKEN}",
                "logit_bias",
            )
        found.append((token, number))
    return tuple(found)


def _finite(value: Any) -> float | None:
    """A number as a float; None if it is no number, not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN


def _grammar(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: a Grammar, or None."""
    if not isinstance(value, Grammar | None):
        raise InvalidRequestError(f"grammar must be a Grammar(...), not {shortened(value)}", attribute.name)


def _top_k(value: Any) -> Any:
    """An attrs converter: -1, which other engines call "all", becomes 0."""
    return 0 if isinstance(value, int) and value == -1 else value


@frozen(kw_only=True)
class SamplingParams:
    """How to sample one request's tokens. The defaults sample from the model's distribution, unchanged.

    `stop` may be a single string, `stop_token_ids` a list, and `logit_bias` a dict.
    Raises InvalidRequestError, with `parameter` set, for a value of a wrong type or out of range.
    """

    max_tokens: int | None = field(default=None, validator=_number(1, 2**31, whole=True))
    """Maximum tokens to generate; None: until the context is full."""
    min_tokens: int = field(default=0, validator=_number(0, 2**31, whole=True))
    """Stop tokens and stop strings do not end the request before this many tokens."""
    temperature: float = field(default=1.0, validator=_number(0, 100))
    """0: always the most likely token."""
    top_k: int = field(default=0, converter=_top_k, validator=_number(0, 2**31, whole=True))
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: float = field(default=1.0, validator=_number(0, 1, low_open=True))
    """Keep the smallest set of most likely tokens whose probabilities add up to at least p."""
    min_p: float = field(default=0.0, validator=_number(0, 1))
    """Drop tokens whose probability is below min_p times that of the most likely token."""
    repetition_penalty: float = field(default=1.0, validator=_number(0.01, 100))
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = field(default=0.0, validator=_number(-2, 2))
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = field(default=0.0, validator=_number(-2, 2))
    """Subtracted from the logit of each token once per occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_logit_bias)
    """(token, bias) pairs: the bias is added to the logit of the token."""
    seed: int | None = field(default=None, validator=_number(0, MAX_SEED, whole=True))
    """The same seed gives the same tokens, whatever else is in the batch; None: a random seed per request."""
    logprobs: int | None = field(default=None, validator=_number(0, 1000, whole=True))
    """Return log probabilities of each sampled token and of this many most likely tokens; None: return none."""
    prompt_logprobs: int | None = field(default=None, validator=_number(0, 1000, whole=True))
    """As `logprobs`, for each prompt token after the first."""
    stop: tuple[str, ...] = field(default=(), converter=_stop_strings)
    """Strings that end the text, and are not part of the text."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_stop_token_ids)
    """Tokens that end the request, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = field(default=False, validator=_flag)
    """Do not stop at the model's end-of-sequence tokens."""
    skip_special_tokens: bool = field(default=True, validator=_flag)
    """Leave special tokens out of the text."""
    grammar: Grammar | None = field(default=None, validator=_grammar)
    """What the output must match, unless `max_tokens` or `stop` ends it early; None: anything. Where the grammar allows
    no further token, the output ends, even before `min_tokens`."""

    def __attrs_post_init__(self) -> None:
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos would go on where the grammar has ended; leave one of the two out", "ignore_eos"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", "min_tokens"
            )

    def of_choice(self, choice: int) -> SamplingParams:
        """The parameters of completion number `choice` of one prompt. If a seed is set, each completion has another."""
        if self.seed is None or choice == 0:
            return self
        return evolve(self, seed=(self.seed + choice) % (MAX_SEED + 1))

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set, so that the next token depends on how often each token came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: by temperature (0 or nearly 0), or by top_k = 1."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1
