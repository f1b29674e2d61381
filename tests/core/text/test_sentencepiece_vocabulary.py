"""A tokenizer.model without tokenizer.json is read as the sentencepiece package reads it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.errors import CheckpointError, InvalidRequestError
from engine.core.text.detokenizer import Detokenizer
from engine.core.text.sentencepiece_vocabulary import has_sentencepiece_model
from engine.core.text.token_cache import TokenCache
from engine.core.text.token_stream import TokenStream
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import SamplingParams

sentencepiece = pytest.importorskip("sentencepiece", reason="the extra sentencepiece is not installed")

CORPUS = [
    "def main(args): return the other thing",
    "Über straße 你好世界 🦀🦀 end",
    "  indent\n\tx = 1",
    "the quick brown fox jumps over the lazy dog",
]
LLAMA = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "user_defined_symbols": ["<think>", "▁▁▁▁"]},
    "unigram": {"model_type": "unigram", "vocab_size": 120},
    "no prefix": {**LLAMA, "add_dummy_prefix": False},
    "suffix": {"model_type": "unigram", "vocab_size": 120, "treat_whitespace_as_suffix": True},
}
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "legacy": False,
    "chat_template": "{% for m in messages %}<|turn|> {{ m['content'] }}</s>{% endfor %}",
    "added_tokens_decoder": {
        "400": {"content": "<|turn|>", "special": True, "rstrip": True},
        "401": {"content": "<tool>", "special": False, "lstrip": True},
    },
}
TEXTS = ["the other", " the  other ", "a<think>b", "🦀\n x日本", "", "    x", "Über ①ﬁ"]


def train(**options: Any) -> bytes:
    """A model of sentencepiece, of a few hundred pieces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return written.getvalue()


def write(directory: Path, options: dict[str, Any], config: dict[str, Any] | None) -> Any:
    """Write a model directory; returns the package's own tokenizer."""
    model = train(**options)
    (directory / "tokenizer.model").write_bytes(model)
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Per model, the tokenizer and the package's own."""
    found = {}
    for name, options in MODELS.items():
        directory = tmp_path_factory.mktemp("model")
        theirs = write(directory, options, None)
        found[name] = (Tokenizer.open(directory), theirs)
    return found


@pytest.mark.parametrize("legacy", [False, True])
def test_parts_of_a_text_have_the_tokens_of_the_whole(tmp_path: Path, legacy: bool) -> None:
    write(tmp_path, LLAMA, CONFIG | {"legacy": legacy})
    tokenizer = Tokenizer.open(tmp_path)
    cache = TokenCache(tokenizer, 2**20, min_text=0, min_part=1)
    pieces = st.sampled_from(["<|turn|>", "<tool>", "<s>", "</s>", "<unk>", "<", " ", "\n", "the ", "other", "x", "▁"])

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(pieces, max_size=10).map("".join), min_size=1, max_size=3))
    def check(turns: list[str]) -> None:
        for count in range(1, len(turns) + 1):
            text = "".join(turns[:count])
            assert cache.encode(text) == tuple(tokenizer.encode(text, add_special_tokens=False))

    check()
    assert tokenizer.separators is not None
    assert list(tokenizer.separators.split("a<s> b<|turn|> c<tool>d</s>", 1)) == ["a", "<s> b<|turn|> c<tool>d", "</s>"]


@pytest.mark.parametrize("name", MODELS)
def test_encode_and_decode_agree_with_the_package_on_any_text(
    opened: dict[str, tuple[Tokenizer, Any]], name: str
) -> None:
    tokenizer, theirs = opened[name]

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(st.sampled_from(TEXTS), st.text(alphabet="the <>\n▁🦀é日x", max_size=12), st.text(max_size=8)))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids)

    check()
    assert tokenizer.vocab_size == theirs.get_piece_size()


@pytest.mark.parametrize("name", MODELS)
def test_decoding_and_streaming_any_tokens_agree_with_the_package(
    opened: dict[str, tuple[Tokenizer, Any]], name: str
) -> None:
    tokenizer, theirs = opened[name]
    piece = theirs.piece_to_id
    spaces = [piece("▁"), theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), piece("▁o"), piece("<0x20>")]
    anything = st.integers(0, theirs.get_piece_size() - 1).filter(lambda token: not theirs.is_byte(token))

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(spaces), anything), max_size=14))
    def check(ids: list[int]) -> None:
        expected = theirs.decode(ids)
        assert tokenizer.decode(ids) == expected
        stream = TokenStream(tokenizer, True)
        assert "".join(map(stream.push, ids)) + stream.flush() == expected
        at_a_time = TokenStream(tokenizer, True)
        assert at_a_time.extend(ids) == expected

    check()


def test_characters_of_several_byte_tokens_are_streamed_whole(opened: dict[str, tuple[Tokenizer, Any]]) -> None:
    tokenizer, theirs = opened["llama"]
    ids = theirs.encode("x日本")
    stream = TokenStream(tokenizer, True)
    assert [stream.push(token) for token in ids] == ["", "x", "", "", "日", "", "", "本"]
    cut = tokenizer.encode("日", add_special_tokens=False)[:-1]
    assert tokenizer.decode(cut) == "\ufffd"
    params = SamplingParams(max_tokens=9)
    assert Detokenizer(tokenizer, ids[:-1], params).push(ids[-1:]) == "本", "it begins in the prompt"


def test_answer_after_a_prompt_keeps_its_space(opened: dict[str, tuple[Tokenizer, Any]]) -> None:
    tokenizer, _ = opened["llama"]
    ids = tokenizer.encode("the other")
    assert tokenizer.decode(ids) == "the other"
    assert Detokenizer(tokenizer, ids[:-1], SamplingParams()).push(ids[-1:]) == " other"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Tokenizer]]:
    """Makes a tokenizer with special and added tokens; arguments change its configuration."""

    def make(**changes: Any) -> tuple[Path, Tokenizer]:
        directory = tmp_path_factory.mktemp("chat")
        write(directory, MODELS["llama"], CONFIG | changes)
        return directory, Tokenizer.open(directory)

    return make


def test_special_and_added_tokens_agree_with_transformers(chat: Callable[..., tuple[Path, Tokenizer]]) -> None:
    from transformers import LlamaTokenizer

    directory, tokenizer = chat()
    theirs = LlamaTokenizer.from_pretrained(str(directory), local_files_only=True)
    for text in ("<s>hi", "x<|turn|>  the", "x  <tool> <|turn|>", "<tool> the</s> the", "the</s>x<tool>", "the other"):
        assert tokenizer.encode(text) == theirs.encode(text)
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert tokenizer.eos_token_id == theirs.eos_token_id == 2
    assert (tokenizer.vocab_size, tokenizer.special_tokens) == (402, {1, 2, 400})
    messages = [{"role": "user", "content": "the other"}]
    assert tokenizer.chat(messages) == theirs.encode("<|turn|> the other</s>", add_special_tokens=False)


def test_settings_of_the_checkpoint_are_honoured(chat: Callable[..., tuple[Path, Tokenizer]]) -> None:
    ids = {
        name: chat(**changes)[1].encode("the</s>the")
        for name, changes in {
            "neither": {"add_bos_token": False},
            "both": {"add_eos_token": True},
            "legacy": {"legacy": True},
            "no prefix": {"add_prefix_space": False},
        }.items()
    }
    the, spaced = ids["legacy"][1], ids["both"][1]
    after_special = ids["both"][3]
    assert ids == {
        "neither": [spaced, 2, after_special],
        "both": [1, spaced, 2, after_special, 2],
        "legacy": [1, the, 2, the],
        "no prefix": [1, after_special, 2, after_special],
    }
    assert the == spaced != after_special


def test_unusual_ids_and_texts_are_refused_or_empty(opened: dict[str, tuple[Tokenizer, Any]]) -> None:
    tokenizer, _ = opened["llama"]
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.token_bytes(10**6) == b""
    with pytest.raises(InvalidRequestError, match="token id is negative or above"):
        tokenizer.decode([-1])
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_only_a_model_of_sentencepiece_without_tokenizer_json_is_read_by_the_package(tmp_path: Path) -> None:
    assert not has_sentencepiece_model(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # a vocabulary of tiktoken
    assert not has_sentencepiece_model(tmp_path)
    write(tmp_path, MODELS["unigram"], None)
    assert has_sentencepiece_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not has_sentencepiece_model(tmp_path)


def test_open_says_which_packages_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, MODELS["unigram"], None)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(CheckpointError, match=r"needs sentencepiece and protobuf \(`pip install"):
        Tokenizer.open(tmp_path)
