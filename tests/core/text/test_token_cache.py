"""Tokens that are kept of parts of texts: exactly those of the whole, for every kind of tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, models, normalizers, pre_tokenizers

from engine.core.errors import InvalidRequestError
from engine.core.text.token_cache import MIN_PART, MIN_TEXT, AddedText, Separators, TokenCache, _longest_of, _size
from engine.core.text.tokenizer import Tokenizer
from engine.core.tokens import Tokens
from tests.core.text.tokenizers_under_test import TOKENIZERS, byte_fallback, byte_level, metaspace, wrap

PART = "<|im_start|>"
PIECES = [
    *("<s>", "</s>", PART, "<|im_", "start|>", "<|im_start|>x", "x<|im", "<left>", "<right>", "<word>", "<norm>"),
    *("_<edge>_", " <blank> "),
    *("<think>", "<|", "|>", "the ", " the", "ing", "a", "é", "你好", "🦀", "  ", "\n", "\t ", "<", ">", "_", "12"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join) | st.text(max_size=12)


def demanding(build: Callable[[], Backend]) -> Backend:
    """A tokenizer with added tokens of every kind, which overlap."""
    backend = build()
    backend.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("<|im_start|>x", normalized=False),
            AddedToken("x<|im", normalized=False),
            AddedToken(" <blank> ", normalized=False),
            AddedToken("_<edge>_", normalized=False),
        ]
    )
    backend.add_tokens([AddedToken("<norm>", normalized=True), AddedToken("ing<", normalized=True)])
    return backend


def prefixing() -> Backend:
    """A byte-level tokenizer that puts a space before every piece of text."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    return backend


def first_only() -> Backend:
    """A tokenizer that puts a space before the beginning of a text only, and rewrites characters."""
    backend = metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])  # type: ignore[assignment]
    return backend


TESTED = dict(TOKENIZERS) | {
    f"demanding {build.__name__}": Tokenizer(wrap(demanding(build)))
    for build in (byte_level, byte_fallback, metaspace, prefixing, first_only)
}


def whole(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def cache_of(tokenizer: Tokenizer, max_bytes: int = 2**20, min_part: int = 1) -> TokenCache:
    return TokenCache(tokenizer, max_bytes, min_text=0, min_part=min_part)


@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(texts, min_size=1, max_size=3), min_part=st.sampled_from([1, 1, 8]))
@example(turns=["the <right> \n<|im_start|>", "a<left>"], min_part=1)
@example(turns=["<word>_<edge>_a"], min_part=1)
@example(turns=["a<right> <blank> b"], min_part=1)
@example(turns=["x<|im_start|>x<|im_start|>the", "<word><s><word>a"], min_part=1)
def test_tokens_of_a_growing_text_are_those_of_the_whole(name: str, turns: list[str], min_part: int) -> None:
    tokenizer, text = TESTED[name], ""
    cache = cache_of(tokenizer, min_part=min_part)
    for turn in turns:
        text += turn
        assert cache.encode(text) == cache.encode(text) == whole(tokenizer, text)


@pytest.mark.parametrize("name", TESTED)
def test_every_kind_of_tokenizer_has_separators_without_conditions(name: str) -> None:
    separators = TESTED[name].separators
    assert separators is not None
    assert list(separators.split("a<s>b<|im_start|>c</s>", 1)) == ["a", "<s>b", "<|im_start|>c", "</s>"]
    for text in ("a<left>b", "a<right>b", "a<word>b", "a<norm>b", "a <blank> b", "a_<edge>_b"):
        if "demanding" in name:
            assert list(separators.split(text, 1)) == [text]


def test_separators_of_equal_beginning_are_matched_longest_first() -> None:
    separators = Separators([AddedText("<a>", True), AddedText("<a>b", False), AddedText("", True)])
    assert list(separators.split("x<a>bx<a>c", 1)) == ["x<a>bx", "<a>c"]


short = st.text("ab<|\n", max_size=5)


@settings(deadline=None)
@given(added=st.lists(short.filter(bool), min_size=1, max_size=8, unique=True), text=st.text("ab<|\n", max_size=30))
def test_of_the_added_texts_at_one_place_the_longest_is_found(added: list[str], text: str) -> None:
    one_by_one = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    found = re.compile(_longest_of(sorted(added)))
    assert [match.span() for match in found.finditer(text)] == [match.span() for match in one_by_one.finditer(text)]


def test_parts_have_a_least_length_and_are_those_of_any_longer_text() -> None:
    separators = Separators([AddedText("<a>", True)])
    text = "<a>12<a>345678<a>9<a>"
    assert list(separators.split(text, 8)) == ["<a>12<a>345678", "<a>9<a>"]
    assert list(separators.split(text + "0123456789<a>", 8)) == ["<a>12<a>345678", "<a>9<a>0123456789", "<a>"]


@pytest.mark.parametrize("change", ["dropout", "spelled out"])
def test_nothing_is_cut_where_tokens_depend_on_more_than_the_text(change: str) -> None:
    wrapped = wrap(byte_level())
    if change == "dropout":
        assert isinstance(wrapped.backend_tokenizer.model, models.BPE)
        wrapped.backend_tokenizer.model.dropout = 0.5
    else:
        wrapped.backend_tokenizer.encode_special_tokens = True
    assert Tokenizer(wrapped).separators is None


class Counting:
    """Counts the characters that a tokenizer tokenizes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.separators = tokenizer.separators
        self._tokenizer = tokenizer
        self.chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def cache(self, max_bytes: int = 2**20, **options: Any) -> TokenCache:
        return TokenCache(self, max_bytes, **options)  # type: ignore[arg-type]


@pytest.fixture
def counting() -> Counting:
    return Counting(TOKENIZERS["byte_level"])


def chat(*lengths: int) -> str:
    return "".join(PART + "the other " * (length // 10) for length in lengths)


def test_a_turn_tokenizes_what_is_new(counting: Counting) -> None:
    cache = counting.cache()
    first = chat(5000, 3000, 10, 10, 2000)
    cache.encode(first)
    counting.chars = 0
    cache.encode(first + chat(700))
    assert counting.chars == 700 + len(PART)
    counting.chars = 0
    assert cache.encode(chat(5000, 3000)) == whole(TOKENIZERS["byte_level"], chat(5000, 3000))
    assert counting.chars == 0


def test_salts_share_nothing(counting: Counting) -> None:
    cache = counting.cache()
    for salt in ("", "a", "b"):
        counting.chars = 0
        assert cache.encode(chat(5000), salt) == cache.encode(chat(5000), salt)
        assert counting.chars == len(chat(5000)), "tokenized for this salt, and once"


def test_short_texts_are_not_kept_and_long_parts_are_cut_only_where_they_may_be(counting: Counting) -> None:
    cache = counting.cache()
    cache.encode("x" * (MIN_TEXT - 1))
    assert cache.bytes == 0
    assert (
        len(list(Separators([AddedText(PART, True)]).split(chat(*[10] * 100)))) <= 1 + len(chat(*[10] * 100)) / MIN_PART
    )


def test_memory_is_bounded_and_the_least_recently_used_part_goes_first(counting: Counting) -> None:
    one = _size(("", chat(1000) + "1"), Tokens(counting.encode(chat(1000) + "1")))
    cache = counting.cache(3 * one, min_text=0)
    for number in (1, 2, 1, 3, 4):  # different texts of almost one length
        cache.encode(chat(1000) + str(number))
        assert 0 < cache.bytes <= 3 * one
    counting.chars = 0
    cache.encode(chat(1000) + "4")
    assert counting.chars == 0
    cache.encode(chat(1000) + "2")
    assert counting.chars > 0
    cache.encode("x" * 20 * one)
    assert cache.bytes <= 3 * one


def test_without_memory_nothing_is_kept(counting: Counting) -> None:
    cache = counting.cache(0)
    assert cache.encode(chat(5000)) == cache.encode(chat(5000))
    assert (cache.bytes, counting.chars) == (0, 2 * len(chat(5000)))


def test_a_lone_surrogate_is_refused_and_not_kept() -> None:
    cache = cache_of(TOKENIZERS["byte_level"])
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="not Unicode"):
            cache.encode("a<s>b\ud83d<s>c")
    assert cache.encode("a<s>b") == whole(TOKENIZERS["byte_level"], "a<s>b")


def test_several_threads_tokenize_with_one_cache() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    cache = cache_of(tokenizer, max_bytes=20_000)
    wanted = [chat(*range(10, 200, step)) for step in range(10, 90)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(cache.encode, wanted)) == [whole(tokenizer, text) for text in wanted]
    assert cache.bytes == sum(_size(*entry) for entry in cache._parts.items())
