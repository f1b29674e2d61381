"""The tokenizer and the chat template."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Backend

from engine.core.config.tree import ModelConfig
from engine.core.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.core.text.detokenizer import Detokenizer
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import SamplingParams

from .tokenizers_under_test import (
    BUILDERS,
    TEMPLATE,
    TOKENIZERS,
    byte_level,
    every_tokenizer,
    wrap,
)


@every_tokenizer
def test_decode_agrees_with_the_tokenizers_library(tokenizer: Tokenizer) -> None:
    text = "the other"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._vocabulary.backend.decode(ids) == text


def test_decode_keeps_special_tokens_on_request() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the</s>")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s>"
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.vocab_size == 332


@every_tokenizer
def test_decode_ignores_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.token_bytes(10**6) == b""
    for use in (lambda: tokenizer.decode([-1]), lambda: Detokenizer(tokenizer, (-1,), SamplingParams())):
        with pytest.raises(InvalidRequestError, match="token id is negative or above"):
            use()


def test_encode_raises_for_a_lone_surrogate() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        TOKENIZERS["byte_level"].encode("a\ud800")


@given(ids=st.lists(st.integers(0, 500), max_size=20))
def test_token_bytes_add_up_to_the_text(ids: list[int]) -> None:
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        pieces = b"".join(map(tokenizer.token_bytes, ids))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert pieces.decode("utf-8", "replace") in (text, " " + text)  # a decoder may drop a space at the beginning


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback_with_space"])
def test_byte_fallback_tokens_have_the_bytes_that_the_library_decodes(name: str) -> None:
    tokenizer, windowed = TOKENIZERS[name], TOKENIZERS["unusual_byte_fallback"]
    assert tokenizer.byte_table(False) is not None
    assert windowed.byte_table(False) is None
    for token in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(token) == windowed.token_bytes(token)


def test_token_bytes_keep_leading_spaces() -> None:
    llama, gpt, bert = TOKENIZERS["byte_fallback"], TOKENIZERS["byte_level"], TOKENIZERS["word_piece"]
    find = llama._vocabulary.backend.token_to_id
    names = ("▁the", "the", "<s>", "<0x0A>", "<0xE4>")
    assert [llama.token_bytes(find(name)) for name in names] == [b" the", b"the", b"<s>", b"\n", b"\xe4"]
    crab = gpt.encode("🦀x")
    assert b"".join(map(gpt.token_bytes, crab)) == "🦀x".encode()
    find = bert._vocabulary.backend.token_to_id
    assert [bert.token_bytes(find(name)) for name in ("the", "##ing", "</s>")] == [b" the", b"ing", b" </s>"]


def test_encode_neither_truncates_nor_pads() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=100)
    assert (
        Tokenizer(wrap(backend, model_max_length=2)).decode(
            Tokenizer(wrap(backend, model_max_length=2)).encode("the other thing")
        )
        == "the other thing"
    )


def test_encode_lets_other_threads_run() -> None:
    tokenizer = Tokenizer(wrap(byte_level()))
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode("x " * 100_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3


@pytest.mark.parametrize("name", TOKENIZERS)
def test_exceeds_is_true_for_texts_of_twice_as_many_tokens_only(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in ("the other thing " * 8000, "a" * 70_000, "世 é 🦀 " * 12_000):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        assert not tokenizer.exceeds(text, count)
        assert count < 100 or tokenizer.exceeds(text, count // 3)


def test_exceeds_reads_no_more_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = TOKENIZERS["byte_level"], list[int]()
    encode = tokenizer.encode

    def count(text: str, add_special_tokens: bool = True) -> list[int]:
        read.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", count)
    assert tokenizer.exceeds("the other " * 500_000, 1000)
    assert sum(read) < 50_000


@pytest.mark.parametrize("name", TOKENIZERS)
def test_many_tokens_are_decoded_as_few_are(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the other thing 世é " * 400)
    assert len(ids) > 1024
    assert tokenizer.decode(ids) == tokenizer._vocabulary.backend.decode(ids)


def save(path: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(names | config))
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def test_open_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = byte_level()
    save(tmp_path, backend, chat_template=TEMPLATE)
    ours, theirs = Tokenizer.open(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("the </s> other", "  in\n é 🦀"):
        ids = backend.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, False) == theirs.decode(ids)
    assert ours.eos_token_id == theirs.eos_token_id
    messages = [{"role": "user", "content": "the other"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == expected


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "word_piece"])
def test_open_follows_tokenizer_json_whatever_the_class(tmp_path: Path, name: str) -> None:
    """transformers 5 would put a pre-tokenizer of its own into the tokenizer if tokenizer_class says Llama."""
    backend = BUILDERS[name]()
    tokenizer = Tokenizer.open(save(tmp_path, backend))
    for text in ("the </s> other", "  in é 🦀"):
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_open_and_decode_do_not_import_torch(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), chat_template=TEMPLATE)
    script = (
        "import sys; from engine.core.text import Tokenizer, Detokenizer\n"
        "from engine.core.text.token_stream import TokenStream\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "theirs = 'torch' in sys.modules  # older releases of transformers import torch\n"
        f"tokenizer = Tokenizer.open({str(tmp_path)!r})\n"
        "ids = tokenizer.chat([{'role': 'user', 'content': 'the'}])\n"
        "stream = TokenStream(tokenizer, True); print(''.join(map(stream.push, ids)), tokenizer.decode(ids))\n"
        "assert theirs or 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("user\nthe")


def test_of_model_reads_a_chat_template_from_a_file(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), chat_template=TEMPLATE)
    file = tmp_path / "other.jinja"
    model = ModelConfig(path=str(tmp_path), chat_template=str(file))
    with pytest.raises(ConfigError, match=r"other\.jinja cannot be read .*--chat-template"):
        Tokenizer.of_model(model)
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    tokenizer = Tokenizer.of_model(model)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "the"}])) == "the!"


@pytest.mark.parametrize("named", [True, False], ids=["--chat-template", "the checkpoint's"])
def test_a_byte_order_mark_of_a_chat_template_is_no_part_of_prompts(tmp_path: Path, named: bool) -> None:
    save(tmp_path, byte_level())
    file = tmp_path / ("other.jinja" if named else "chat_template.jinja")
    file.write_text("{{ messages[0].content }}!", encoding="utf-8-sig")
    tokenizer = Tokenizer.of_model(ModelConfig(path=str(tmp_path), chat_template=str(file) if named else ""))
    assert tokenizer.render_chat([{"role": "user", "content": "the"}]) == "the!"
    assert tokenizer.templates.chat == "{{ messages[0].content }}!"


def test_of_model_raises_when_the_template_of_a_file_is_not_jinja(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    file = tmp_path / "other.jinja"
    model = ModelConfig(path=str(tmp_path), chat_template=str(file))
    file.write_text("{{ messages[0].content }}\n{% for %}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.jinja is not valid Jinja \(line 2: .*\); check --chat-template"):
        Tokenizer.of_model(model)
    file.write_text("{% for m in messages %}{%- generation %}!{%+ endgeneration %}{% break %}{% endfor %}", "utf-8")
    assert Tokenizer.of_model(model).decode(Tokenizer.of_model(model).chat([USER])) == "!"


def test_open_raises_without_a_usable_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.open(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_open_names_the_file_that_begins_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).write_text((tmp_path / name).read_text("utf-8"), encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=rf"cannot be read: .*; {name} may be the cause: save as UTF-8"):
        Tokenizer.open(tmp_path)


def test_open_reports_a_damaged_tokenizer_next_to_files_that_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "absent.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory.json").mkdir()
    with pytest.raises(CheckpointError, match=rf"the tokenizer in {tmp_path} cannot be read: "):
        Tokenizer.open(tmp_path)


def test_open_reports_the_error_of_the_library_where_another_file_has_a_byte_order_mark(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=r"cannot be read: Expecting property.*; generation_config.json may be"):
        Tokenizer.open(tmp_path)


# Chat templates

USER = {"role": "user", "content": "the"}


def chat_text(messages: list[dict[str, str]], template: str | None = TEMPLATE, **asked: Any) -> str:
    tokenizer = Tokenizer(TOKENIZERS["byte_level"]._wrapped, template)
    return tokenizer.decode(tokenizer.chat(messages, **asked), skip_special_tokens=False)


def test_chat_ends_where_the_answer_begins() -> None:
    assert chat_text([USER]) == "<|im_start|>user\nthe</s><|im_start|>assistant\n"
    assert chat_text([USER], add_generation_prompt=False) == "<|im_start|>user\nthe</s>"


def test_chat_continues_the_last_message() -> None:
    text = chat_text([USER, {"role": "assistant", "content": "in the"}], continue_final_message=True)
    assert text == "<|im_start|>user\nthe</s><|im_start|>assistant\nin the"


def test_chat_passes_variables_and_tools_to_the_template() -> None:
    assert chat_text([USER], "{{ color }}", color="red") == "red"
    tool = {"type": "function", "function": {"name": "look"}}
    assert chat_text([USER], "{% for t in tools %}{{ t.function.name }}{% endfor %}", tools=[tool]) == "look"


@pytest.mark.parametrize(
    ("messages", "template", "asked", "message", "parameter"),
    [
        ([USER], None, {}, "no chat template.*--chat-template", "messages"),
        ([], TEMPLATE, {}, "messages is empty", "messages"),
        ([USER], "{{ raise_exception('only two roles') }}", {}, "rejects.*only two roles", "messages"),
        ([USER], "{{ messages[0].content + 1 }}", {}, "rejects.*str", "messages"),
        ([USER], "{% if %}", {}, "chat template is not valid Jinja.*line 1.*--chat-template", "messages"),
        ([USER], TEMPLATE, {"tools": [{"type": "function"}]}, "no place for tools", "tools"),
        ([USER], TEMPLATE, {"tokenize": True}, "tokenize is not a variable", "chat_template_kwargs"),
        (
            [USER],
            TEMPLATE,
            {"continue_final_message": True, "add_generation_prompt": True},
            "not compatible",
            "messages",
        ),
    ],
)
def test_chat_raises_for_invalid_arguments(
    messages: list[dict[str, str]], template: str | None, asked: dict[str, Any], message: str, parameter: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat_text(messages, template, **asked)
    assert caught.value.parameter == parameter


def test_the_description_has_the_names_of_tokenizer_config() -> None:
    found = Tokenizer(wrap(byte_level(), chat_template=TEMPLATE)).description
    assert found["tokenizer_class"]
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<s>", "</s>", None)
    assert found["chat_template"] == TEMPLATE
    assert found["vocab_size"] > 256
