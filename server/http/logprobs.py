"""Log probabilities in the shapes of the two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from engine.core.text import Tokenizer
from engine.core.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for; OpenAI does the same."""


def token_name(data: bytes) -> str:
    """A token's text; one that is no whole characters is written as OpenAI does, "bytes:\\xe2\\x82"."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """choices[].logprobs of a chat completion: each token, and `top` likeliest ones beside it."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(data),
        }

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(*likely) for likely in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], top: int, prompt: int = 0
) -> dict[str, list[Any]]:
    """choices[].logprobs of a completion.

    entries: None for a prompt's first token, `prompt`, which has no log probability.
    offsets: where in the text each token begins, characters.
    """

    def name(token: int) -> str:
        return token_name(tokenizer.token_bytes(token))

    def likely(entry: TokenLogprobs) -> dict[str, float]:
        tops = ((entry.token, entry.logprob), *entry.top[:top])
        return {name(token): max(logprob, LOWEST) for token, logprob in tops}

    return {
        "tokens": [name(prompt if entry is None else entry.token) for entry in entries],
        "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": [None if entry is None else likely(entry) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where in the prompt's text each of its tokens begins, characters.

    A special token takes room only where the text has it: one that the tokenizer has put around the text, or that was
    left out when the tokens were decoded, takes none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    length = 0
    for token in prompt:
        offsets.append(length)
        data = tokenizer.token_bytes(token)
        if token not in tokenizer.special_tokens or text.startswith(data.decode(errors="replace"), length):
            length += len(decoder.decode(data))
    return offsets
