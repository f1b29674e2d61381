"""Checks and converts the arguments of Engine's methods. Each refusal names the argument and shows what was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.errors import InvalidRequestError
from engine.core.types import Request, SamplingParams

if TYPE_CHECKING:
    from engine.core.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts of `generate`: one text, or several prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be a text, or a list of texts and lists of token ids, not {shortened(prompts)}", "prompt"
        )
    found = list(prompts)
    if found and _are_ints(found):
        raise InvalidRequestError(
            f"prompts is a list of prompts; write one prompt of token ids as [{shortened(found)}]", "prompt"
        )
    return found


def prompt_tokens(prompt: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of one prompt: a text, or token ids (also an array or tensor of them)."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, bytes) or not _are_ints(values):
        raise InvalidRequestError(f"a prompt must be a text or a list of token ids, not {shortened(prompt)}", "prompt")
    return tuple(values)


def checked_params(params: Any) -> SamplingParams | None:
    """The sampling parameters of one prompt. None: those of the checkpoint."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams(...) or None, not {shortened(params)}", "params")
    return params


def params_list(params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """The sampling parameters of `count` prompts: one for all, one per prompt, or `default`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            f"params must be SamplingParams(...), or one per prompt in a list, not {shortened(params)}", "params"
        )
    each = [checked_params(one) or default for one in params]
    if len(each) != count:
        raise InvalidRequestError(f"{count} prompts came with {len(each)} sampling parameters", "params")
    return each


def conversations(messages: Any) -> list[Conversation]:
    """The conversations of `chat`: one list of messages, or several."""
    several = messages if _is_list(messages) and messages and all(map(_is_list, messages)) else [messages]
    for one in several:
        if not _is_list(one) or not all(isinstance(message, Mapping) and "role" in message for message in one):
            raise InvalidRequestError(
                'messages must be a list of messages like {"role": "user", "content": "..."}, or a list of such lists,'
                f" not {shortened(one)}",
                "messages",
            )
    return list(several)


def check_request(request: Any) -> None:
    """Raise InvalidRequestError for anything but a Request, which has checked its own values."""
    if not isinstance(request, Request):
        raise InvalidRequestError(
            f"add takes a Request(...), not {shortened(request)}; give texts to generate or stream", "request"
        )


def check_tokens(request: Request, vocab_size: int) -> None:
    """Raise InvalidRequestError for a token that is not in the vocabulary."""
    for name, given in (("prompt", request.prompt), ("prediction", request.prediction)):
        ids = np.frombuffer(given.pack(), np.uint32)  # unsigned, so that a negative id is too large as well
        if ids.max(initial=0) >= vocab_size:
            token = given[int(ids.argmax())]
            raise InvalidRequestError(
                f"the {name} holds token {token}, but the model's vocabulary has {vocab_size}", name
            )
    for name, tokens in (
        ("logit_bias", (token for token, _ in request.params.logit_bias)),
        ("stop_token_ids", iter(request.params.stop_token_ids)),
    ):
        if any(token >= vocab_size for token in tokens):
            raise InvalidRequestError(f"{name} names a token beyond the vocabulary of {vocab_size}", name)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise InvalidRequestError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequestError(f"{name} must be a whole number of at least {least}, not {shortened(value)}", name)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_ints(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {int}
