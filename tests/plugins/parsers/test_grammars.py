"""What the grammars of the built-in parsers let pass, the parsers read as the rules say."""

from __future__ import annotations

from engine.core.parsers import Templates
from engine.plugins.parsers.deepseek import DeepSeek
from engine.plugins.parsers.gpt_oss import GptOss
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.llama3 import Llama3
from engine.plugins.parsers.mistral import Mistral
from engine.plugins.parsers.none import NoParser
from engine.plugins.parsers.response_template import ResponseTemplate
from engine.plugins.parsers.tagged import ReasoningTags
from engine.testing.parser_grammars import ParserGrammarConformance
from tests.plugins.parsers import examples

THINK = ("", "<think>\n", "<think>\n\n</think>\n\n")


class Both(ParserGrammarConformance):
    backends = ("llguidance", "xgrammar")


class TestHermes(Both):
    parser = Hermes
    templates = examples.HERMES
    prompts = THINK


class TestLlama3(Both):
    parser = Llama3
    templates = examples.LLAMA3


class TestMistral(Both):
    parser = Mistral
    templates = examples.MISTRAL
    prompts = ("", "[THINK]")


class TestMistralLists(Both):
    parser = Mistral
    templates = Templates(chat="[TOOL_CALLS] [")


class TestDeepSeek(Both):
    parser = DeepSeek
    templates = examples.DEEPSEEK
    prompts = THINK


class TestDeepSeekFenced(Both):
    parser = DeepSeek
    templates = Templates(chat=examples.DEEPSEEK.chat + "```json")
    prompts = THINK


class TestGptOss(Both):
    parser = GptOss
    templates = examples.GPT_OSS
    prompts = ("<|start|>assistant",)
    max_calls = 1


class TestResponseTemplate(Both):
    parser = ResponseTemplate
    templates = examples.RESPONSE
    marks = ("<think>", "</think>", "<call>", "</call>")
    marks_are_special = True
    prompts = ("[assistant]", "[assistant]<think>", "[assistant]<think></think>")


class TestReasoningTags(Both):
    parser = ReasoningTags
    templates = examples.THINK
    prompts = THINK


class TestNoParser(Both):
    parser = NoParser
