"""Converts log probabilities to the JSON of the two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine.core.text import Tokenizer
from engine.core.types import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express; as at OpenAI."""


class JsonLists:
    """Lists by name, encoded as JSON a piece at a time, since encoding long ones takes long."""

    def __init__(self, *names: str) -> None:
        """names: of lists that are there even if nothing is appended."""
        self._pieces: dict[str, list[bytes]] = {name: [] for name in names}

    def extend(self, **lists: Sequence[Any]) -> None:
        """Append to the list of each name."""
        for name, values in lists.items():
            pieces = self._pieces.setdefault(name, [])
            if values:
                pieces.append(msgspec.json.encode(values)[1:-1])

    def body(self) -> dict[str, Any]:
        """The lists, to be encoded as part of a JSON object."""
        return {name: msgspec.Raw(b"[" + b",".join(pieces) + b"]") for name, pieces in self._pieces.items()}


def token_name(data: bytes) -> str:
    """A token's text. A token of incomplete characters is written as at OpenAI: "bytes:\\xe2\\x82"."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """choices[].logprobs of a chat completion: each token with its `top` most likely alternatives."""

    def entry_json(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(data),
        }

    content = [
        entry_json(entry.token, entry.logprob)
        | {"top_logprobs": [entry_json(*alternative) for alternative in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    top: int,
    first_token: int = 0,
) -> dict[str, list[Any]]:
    """choices[].logprobs of a completion.

    entries: None stands for the prompt's first token, `first_token`, which has no log probability.
    offsets: character position in the text at which each token begins.
    top: number of most likely tokens to report.
    """

    def name(token: int) -> str:
        return token_name(tokenizer.token_bytes(token))

    def top_logprobs(entry: TokenLogprobs) -> dict[str, float]:
        pairs = ((entry.token, entry.logprob), *entry.top[:top])
        return {name(token): max(logprob, MIN_LOGPROB) for token, logprob in pairs}

    return {
        "tokens": [name(first_token if entry is None else entry.token) for entry in entries],
        "token_logprobs": [None if entry is None else max(entry.logprob, MIN_LOGPROB) for entry in entries],
        "top_logprobs": [None if entry is None else top_logprobs(entry) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> Iterator[int]:
    """Yield the character position in the prompt's text at which each of the prompt's tokens begins.

    A special token has a length only if it appears in the text. One that the tokenizer added around the text, or that
    decoding left out, has length 0.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    length = 0
    for token in prompt:
        yield length
        data = tokenizer.token_bytes(token)
        if token not in tokenizer.special_tokens or text.startswith(data.decode(errors="replace"), length):
            length += len(decoder.decode(data))
