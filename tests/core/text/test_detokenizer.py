"""TokenStream and Detokenizer: text from tokens, up to a stop string."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from tokenizers import decoders

from engine.core.text.detokenizer import Detokenizer, TextDelta
from engine.core.text.token_stream import TokenStream
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import FinishReason, Output, SamplingParams, TokenLogprobs

from .tokenizers_under_test import (
    BYTES_OF,
    LOSSLESS,
    REPLACEMENT,
    TOKENIZERS,
    every_tokenizer,
)

texts = st.text(
    st.one_of(st.sampled_from("the in\n\t ▁é世你🦀👩\u200d👧"), st.characters(exclude_categories=["Cs"])), max_size=30
)
token_lists = st.lists(st.integers(0, 10**6).map(lambda number: number % 345), max_size=30)


def feed_all(
    detokenizer: Detokenizer,
    tokens: Sequence[int],
    cuts: Iterable[int] = (),
    reason: FinishReason = "length",
    stop_token: int | None = None,
) -> list[TextDelta]:
    """Feed the tokens in several outputs, split at `cuts`; returns all deltas."""
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    deltas = [
        detokenizer.feed(Output(request="r", tokens=tuple(tokens[start:end])))
        for start, end in itertools.pairwise(edges)
    ]
    tail = () if stop_token is None else (stop_token,)
    deltas.append(detokenizer.feed(Output(request="r", tokens=tail, finish_reason=reason, stop_token=stop_token)))
    return deltas


def detokenize(
    tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = (), cuts: Iterable[int] = (), **params: Any
) -> list[TextDelta]:
    return feed_all(Detokenizer(tokenizer, prompt, SamplingParams(**params)), tokens, cuts)


def joined(deltas: Iterable[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# Text


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(prompt=token_lists, tokens=token_lists, skip=st.booleans())
def test_deltas_add_up_to_the_text_after_the_prompt(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], skip: bool
) -> None:
    before = tokenizer.decode(prompt, skip)
    assume(not before.endswith(REPLACEMENT))
    expected = tokenizer.decode(prompt + tokens, skip)[len(before) :]
    deltas = detokenize(tokenizer, tokens, prompt, range(len(tokens)), skip_special_tokens=skip)
    assert joined(deltas) == expected


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(tokens=token_lists, cuts=st.sets(st.integers(0, 30)), skip=st.booleans(), data=st.data())
def test_push_returns_the_text_that_feed_returns(
    tokenizer: Tokenizer, tokens: list[int], cuts: set[int], skip: bool, data: st.DataObject
) -> None:
    text = tokenizer.decode(tokens, skip)
    at = data.draw(st.integers(0, len(text)))
    stops = data.draw(st.sampled_from([(), (text[at : at + 2] or "x",)]))
    params = SamplingParams(skip_special_tokens=skip, stop=stops)
    whole, short = Detokenizer(tokenizer, (), params), Detokenizer(tokenizer, (), params)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in itertools.pairwise(edges):
        piece = tokens[start:end]
        assert short.push(piece) == whole.feed(Output(request="r", tokens=tuple(piece))).text
        assert (short.stop_string, short.num_tokens) == (whole.stop_string, whole.num_tokens)
    last = Output(request="r", finish_reason="length")
    assert short.feed(last) == whole.feed(last)


@pytest.mark.parametrize("name", LOSSLESS)
def test_decode_stream_of_the_library_loses_invalid_bytes_and_ours_does_not(name: str) -> None:
    """DecodeStream returns nothing while invalid bytes follow one another, and drops an incomplete last character."""
    tokenizer = TOKENIZERS[name]
    of = {BYTES_OF[name](token): token for token in range(tokenizer.vocab_size)}
    tokens = [of[b"x"], *[of[b"\xf0"]] * 5]
    theirs = decoders.DecodeStream(skip_special_tokens=True)
    assert [theirs.step(tokenizer._vocabulary.backend, token) for token in tokens] == ["x", *[None] * 5]
    stream = TokenStream(tokenizer, True)
    assert [stream.push(token) for token in tokens] == ["x", "", *[REPLACEMENT] * 4]
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(text=texts, data=st.data())
def test_push_returns_each_character_when_it_is_complete(name: str, text: str, data: st.DataObject) -> None:
    """After each token exactly the complete characters have been returned."""
    tokenizer = TOKENIZERS[name]
    bytes_of = BYTES_OF[name]
    assume(REPLACEMENT not in text)
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode("the" + text)
    assume(tokens[: len(prompt)] == prompt)
    stream, emitted, seen = TokenStream(tokenizer, False, prompt), "", b""
    for token in tokens[len(prompt) :]:
        emitted += stream.push(token)
        seen += bytes_of(token)
        assert emitted == seen.decode("utf-8", "ignore")
    assert emitted + stream.flush() == text


@pytest.mark.parametrize("name", LOSSLESS)
def test_invalid_bytes_do_not_accumulate(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    lead = next(token for token in range(tokenizer.vocab_size) if BYTES_OF[name](token) == b"\xf0")
    stream = TokenStream(tokenizer, True)
    emitted = "".join(stream.push(lead) for _ in range(100))
    assert emitted == REPLACEMENT * 99
    assert len(stream._window) < 10
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize("name", LOSSLESS)
def test_character_that_begins_in_the_prompt_is_emitted_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    of = {BYTES_OF[name](token): token for token in range(tokenizer.vocab_size)}
    crab = [of[bytes([byte])] for byte in "🦀".encode()]
    assert joined(detokenize(tokenizer, crab[2:], [*tokenizer.encode("the"), *crab[:2]])) == "🦀"


def test_byte_token_of_a_leading_space_is_decoded_as_by_the_library() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    space, letter, wrong = (tokenizer._vocabulary.backend.token_to_id(f"<0x{byte:02X}>") for byte in b" x\xff")
    for ids, text in (([space], ""), ([space, letter], "x"), ([space, space], " "), ([space, wrong], REPLACEMENT)):
        assert tokenizer.decode(ids) == joined(detokenize(tokenizer, ids)) == text


def test_invalid_byte_does_not_affect_its_neighbours() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer._vocabulary.backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xc3\xa9\xff\n"]
    assert tokenizer.decode(ids) == joined(detokenize(tokenizer, ids)) == f"é{REPLACEMENT}\n"
    assert tokenizer._vocabulary.backend.decode(ids) == REPLACEMENT * 4


def test_stop_token_counts_as_output_but_has_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.eos_token_id
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(skip_special_tokens=False))
    (the,) = tokenizer.encode("<think>")
    delta = detokenizer.feed(Output(request="r", tokens=(the, end), finish_reason="stop", stop_token=end))
    assert delta == TextDelta(text="<think>", tokens=(the, end), offsets=(0, 7), finish_reason="stop")
    assert detokenizer.feed(Output(request="r", tokens=(the,))) == TextDelta()


def test_skipped_tokens_count_as_output() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    deltas = detokenize(tokenizer, tokenizer.encode("x<s>x"))
    assert [delta.text for delta in deltas] == ["xx", ""]
    assert deltas[0].offsets == (0, 1, 1)


def test_logprobs_end_with_the_counted_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tuple(tokenizer.encode("xyz"))
    logprobs = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in ids)
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("y",)))
    delta = detokenizer.feed(Output(request="r", tokens=ids, logprobs=logprobs))
    assert (delta.text, delta.tokens, delta.logprobs) == ("x", ids[:2], logprobs[:2])


@settings(deadline=None)
@given(text=texts)
def test_offsets_are_where_the_text_of_each_token_begins(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    deltas = detokenize(tokenizer, ids, cuts=range(len(ids)))
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert offsets == [
        len(b"".join(map(tokenizer.token_bytes, ids[:at])).decode("utf-8", "ignore")) for at in range(len(ids))
    ]


# Stop strings


def stopped(text: str, stops: Iterable[str]) -> tuple[str, str | None]:
    """(text before the stop string, stop string), by trying every end: the first completed, the longest of those."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


small_texts = st.text(st.sampled_from("ab \n🦀"), max_size=25)
stop_lists = st.lists(st.text(st.sampled_from("ab \n🦀"), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(text=small_texts, stops=stop_lists, data=st.data())
def test_stop_strings_are_found_at_any_position_and_split(
    name: str, text: str, stops: list[str], data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode("the" + text)
    assume(tokens[: len(prompt)] == prompt)
    tokens = tokens[len(prompt) :]
    cuts = data.draw(st.sets(st.integers(0, len(tokens))))
    deltas = detokenize(tokenizer, tokens, prompt, cuts, stop=tuple(stops))
    expected, stop = stopped(text, stops)
    assert joined(deltas) == expected
    ended = [delta for delta in deltas if delta.finish_reason is not None]
    assert [(delta.finish_reason, delta.stop_string) for delta in ended] == [("stop" if stop else "length", stop)]
    counted = [token for delta in deltas for token in delta.tokens]
    assert counted == tokens[: len(counted)]
    if stop:
        through = [tokenizer.decode(prompt + counted)[3:], tokenizer.decode(prompt + counted[:-1])[3:]]
        assert [stopped(each, stops)[1] for each in through] == [stop, None], "the token that completes it is the last"
    else:
        assert len(counted) == len(tokens)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert len(offsets) == len(counted)
    assert offsets == sorted(offsets)


@given(text=small_texts, stops=stop_lists)
def test_held_text_is_always_the_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer, emitted, seen = Detokenizer(tokenizer, (), SamplingParams(stop=tuple(stops))), "", b""
    for token in tokenizer.encode(text):
        delta = detokenizer.feed(Output(request="r", tokens=(token,)))
        emitted += delta.text
        seen += tokenizer.token_bytes(token)
        if delta.stop_string:
            return
        held = seen.decode("utf-8", "ignore").removeprefix(emitted)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_stop_string_across_tokens_and_outputs_is_found() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("yz!",)))
    x, y, z, mark = (tokenizer.encode(letter)[0] for letter in "xyz!")
    assert detokenizer.feed(Output(request="r", tokens=(x, y))) == TextDelta(text="x", tokens=(x, y), offsets=(0, 1))
    assert detokenizer.feed(Output(request="r", tokens=(y, z))) == TextDelta(text="y", tokens=(y, z), offsets=(2, 3))
    delta = detokenizer.feed(Output(request="r", tokens=(mark, x)))
    assert delta == TextDelta(tokens=(mark,), offsets=(4,), finish_reason="stop", stop_string="yz!")
    assert detokenizer.feed(Output(request="r", tokens=(x,), finish_reason="abort")) == TextDelta()


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "", "xy"), (1, "", "xy"), (2, "xyz", "xy"), (4, "xyz", "xy"), (5, "xyzxyz", None)],
)
def test_stop_strings_do_not_count_before_min_tokens(min_tokens: int, text: str, stop: str | None) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    deltas = detokenize(tokenizer, tokenizer.encode("xyzxyz"), stop=("xy",), min_tokens=min_tokens)
    assert (joined(deltas), max((delta.stop_string for delta in deltas), key=bool)) == (text, stop)


def test_stop_string_in_the_flushed_text_is_found() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    lead = tokenizer.encode("🦁")[0]
    assert not tokenizer.token_bytes(lead).decode("utf-8", "ignore")
    deltas = detokenize(tokenizer, [*tokenizer.encode("x"), lead], stop=(REPLACEMENT,))
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("x", None), ("", "stop")]


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_last_output_emits_the_held_text(reason: FinishReason) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("xyz",)))
    deltas = feed_all(detokenizer, tokenizer.encode("zxy"), reason=reason)
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("z", None), ("xy", reason)]


def test_special_tokens_that_a_parser_needs_stay_in_the_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    begin, end = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<|im_start|>", "</s>"))
    tokens = [begin, *tokenizer.encode("hi", add_special_tokens=False), end]
    kept = Detokenizer(tokenizer, (), SamplingParams(), frozenset({begin}))
    assert kept.push(tokens) == "<|im_start|>hi"
    assert Detokenizer(tokenizer, (), SamplingParams()).push(tokens) == "hi"
    other = TOKENIZERS["metaspace"]
    token = other.encode("<|im_start|>", add_special_tokens=False)[0]
    assert Detokenizer(other, (), SamplingParams(), frozenset({token})).push([token]) == "<|im_start|>"
