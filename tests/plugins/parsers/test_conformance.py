"""The built-in parsers keep the contract."""

from __future__ import annotations

from engine.plugins.parsers.deepseek import DeepSeek
from engine.plugins.parsers.gpt_oss import GptOss
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.llama3 import Llama3
from engine.plugins.parsers.mistral import Mistral
from engine.plugins.parsers.none import NoParser
from engine.plugins.parsers.response_template import ResponseTemplate
from engine.plugins.parsers.tagged import ReasoningTags
from engine.testing.parsers import ParserConformance
from tests.plugins.parsers import examples


class TestHermes(ParserConformance):
    parser = Hermes
    templates = examples.HERMES
    examples = examples.HERMES_EXAMPLES


class TestLlama3(ParserConformance):
    parser = Llama3
    templates = examples.LLAMA3
    examples = examples.LLAMA3_EXAMPLES


class TestMistral(ParserConformance):
    parser = Mistral
    templates = examples.MISTRAL
    examples = examples.MISTRAL_EXAMPLES


class TestDeepSeek(ParserConformance):
    parser = DeepSeek
    templates = examples.DEEPSEEK
    examples = examples.DEEPSEEK_EXAMPLES


class TestGptOss(ParserConformance):
    parser = GptOss
    templates = examples.GPT_OSS
    examples = examples.GPT_OSS_EXAMPLES


class TestResponseTemplate(ParserConformance):
    parser = ResponseTemplate
    templates = examples.RESPONSE
    examples = examples.RESPONSE_EXAMPLES


class TestReasoningTags(ParserConformance):
    parser = ReasoningTags
    templates = examples.THINK
    examples = examples.THINK_EXAMPLES


class TestNoParser(ParserConformance):
    parser = NoParser
    examples = examples.NONE_EXAMPLES
