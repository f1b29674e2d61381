from __future__ import annotations

import math
from typing import Any, cast

import msgspec

from engine.core.text.tokenizer import Tokenizer
from engine.core.types import TokenLogprobs
from engine.server.http.logprobs import (
    MIN_LOGPROB,
    JsonLists,
    chat_logprobs,
    completion_logprobs,
    prompt_offsets,
    token_name,
)


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is special, written <s>, 300 a whole euro sign."""

    special_tokens = frozenset({256})

    def token_bytes(self, token: int) -> bytes:
        whole = {256: "<s>", 300: "€"}
        return whole[token].encode() if token in whole else bytes([token])


TOKENIZER = cast(Tokenizer, Bytes())


def entry(token: int, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=-1.5, rank=1, top=top)


def test_token_names_show_incomplete_characters_as_bytes() -> None:
    assert token_name("é".encode()) == "é"
    assert token_name(b"\xe2\x82") == "bytes:\\xe2\\x82"


def test_offsets_count_whole_characters() -> None:
    prompt = [ord("a"), *"€".encode(), ord("b"), 256, 300, ord("c")]
    assert list(prompt_offsets(TOKENIZER, prompt, "a€b€c")) == [0, 1, 1, 1, 2, 3, 3, 4]


def test_offsets_count_special_tokens_that_appear_in_the_text() -> None:
    prompt = [256, ord("a"), 256, ord("b")]
    assert list(prompt_offsets(TOKENIZER, prompt, "a<s>b")) == [0, 0, 1, 4]
    assert list(prompt_offsets(TOKENIZER, prompt, "<s>a<s>b")) == [0, 3, 4, 7]
    assert list(prompt_offsets(TOKENIZER, prompt, "ab")) == [0, 0, 1, 1]


def test_top_logprobs_contain_the_sampled_token() -> None:
    body = completion_logprobs(TOKENIZER, [entry(ord("a"), (ord("b"), -0.5), (ord("c"), -0.75))], [3], top=1)
    assert body == {
        "tokens": ["a"],
        "token_logprobs": [-1.5],
        "top_logprobs": [{"a": -1.5, "b": -0.5}],
        "text_offset": [3],
    }


def test_the_first_prompt_token_has_no_logprob() -> None:
    body = completion_logprobs(TOKENIZER, [None, entry(0xE2)], [0, 1], top=1, first_token=ord("a"))
    assert body["tokens"] == ["a", "bytes:\\xe2"]
    assert body["token_logprobs"] == [None, -1.5]
    assert body["top_logprobs"] == [None, {"bytes:\\xe2": -1.5}]


def test_chat_logprobs_have_bytes_and_no_infinity() -> None:
    body: Any = chat_logprobs(TOKENIZER, [entry(0xE2, (ord("b"), -math.inf), (ord("c"), -9.0))], top=1)
    (token,) = body["content"]
    assert token["token"] == "�"
    assert token["bytes"] == [0xE2]
    assert token["top_logprobs"] == [{"token": "b", "logprob": MIN_LOGPROB, "bytes": [ord("b")]}]


def test_lists_encoded_in_pieces_are_the_lists() -> None:
    lists = JsonLists("empty")
    lists.extend(a=[1, "x"], b=[])
    lists.extend(a=[], b=[{"c": None}])
    lists.extend(a=[[2]])
    assert msgspec.json.decode(msgspec.json.encode(lists.body())) == {
        "empty": [],
        "a": [1, "x", [2]],
        "b": [{"c": None}],
    }
