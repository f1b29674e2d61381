"""Which parser auto takes for the templates of a model."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engine.core.config import EngineConfig
from engine.core.config.tree import ParserConfig
from engine.core.errors import ConfigError, PluginError
from engine.core.parsers import Content, Templates
from engine.core.plugin_host import choose_parser, load_plugins
from engine.core.text import Tokenizer
from engine.plugins.parsers.gpt_oss import GptOss
from engine.plugins.parsers.response_template import ResponseTemplate
from engine.plugins.parsers.tagged import ReasoningOptions
from tests.core.text.tokenizers_under_test import TEMPLATE, byte_level, wrap
from tests.plugins.parsers import examples


def choose(chat: str, name: str = "auto", **options: object) -> tuple[str, object]:
    """Name and options of the parser for a chat template."""
    config = evolve(EngineConfig(), parser=ParserConfig(name=name, options=options))
    parser, choice = choose_parser(config, load_plugins(), Templates(chat=chat))
    return choice.name, parser.options


@pytest.mark.parametrize(
    ("chat", "name"),
    [
        ("", "none"),
        (TEMPLATE, "none"),
        (examples.HERMES.chat, "hermes"),
        (examples.LLAMA3.chat, "llama3_json"),
        (examples.MISTRAL.chat, "mistral"),
        (examples.DEEPSEEK.chat, "deepseek"),
        (examples.GPT_OSS.chat, "gpt_oss"),
        (examples.THINK.chat, "think"),
        ("<tool_call><function={{ name }}><parameter=a>", "none"),
        ("<tool_call>{{ name }}<arg_key> <think></think>", "think"),
    ],
)
def test_auto_goes_by_the_chat_template(chat: str, name: str) -> None:
    assert choose(chat)[0] == name


def test_a_response_template_goes_first() -> None:
    templates = Templates(chat=examples.HERMES.chat, response=examples.RESPONSE.response)
    assert choose_parser(EngineConfig(), load_plugins(), templates)[1].name == "response_template"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (None, "has no response template"),
        ({"start_anchor": "a", "fields": {"content": {}, "mood": {"open": "x"}}}, "the field 'mood'"),
        ({"start_anchor": "a", "fields": {"content": {"open": "x"}}}, "drops text"),
        ({"fields": {"content": {}}}, "is wrong: response_template must define"),
        ({"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}, "is wrong: Field 'content'"),
    ],
)
def test_a_response_template_that_loses_text_is_refused(response: Any, reason: str) -> None:
    refusal = ResponseTemplate.refuses(Templates(response=response))
    assert refusal is not None
    assert reason in refusal


def test_a_parser_that_is_named_is_taken_whatever_the_template() -> None:
    assert choose("", "hermes", reasoning=True) == ("hermes", ReasoningOptions(reasoning=True))


def test_wrong_names_and_options_are_refused() -> None:
    with pytest.raises(PluginError, match="there is no parser plugin 'herme'"):
        choose("", "herme")
    with pytest.raises(ConfigError, match=r"parser\.options"):
        choose("", "hermes", reasonin=True)


def test_the_templates_of_a_tokenizer_are_its_sources() -> None:
    assert Tokenizer(wrap(byte_level(), chat_template=TEMPLATE)).templates == Templates(chat=TEMPLATE)
    assert Tokenizer(wrap(byte_level())).templates == Templates()
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert Tokenizer(wrap(byte_level(), chat_template=several)).templates.chat == "b"
    assert Tokenizer(wrap(byte_level(), chat_template="a"), "given").templates.chat == "given"


def test_text_without_a_header_is_not_held() -> None:
    parsing = GptOss(None, Templates()).begin("<|start|>assistant", [])
    assert parsing.feed("It is") == [Content("It is")]
