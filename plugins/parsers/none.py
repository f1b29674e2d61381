"""All of the text is content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.grammars import Grammar
from engine.core.parsers import OutputRules, Parser, Templates


class NoParser(Parser[None]):
    """For models that neither reason in marks nor call tools."""

    api = "1"
    reads_calls = False
    describes_format = True

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return True

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        return None

    def grammar(self, rules: OutputRules) -> Grammar | None:
        return rules.content
