"""The variables of chat templates."""

from __future__ import annotations

import pytest

from engine.core.parsers import reasoning_switch, template_variables

DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% if thinking %}<think>{% endif %}"
QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
HISTORY = "{% for one in messages %}{% set thinking = one.thinking %}{{ thinking }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        (DEEPSEEK, "thinking"),
        (QWEN, "enable_thinking"),
        (DEEPSEEK + QWEN, "enable_thinking"),
        (HISTORY, None),
        ("", None),
    ],
)
def test_the_switch_is_a_variable_that_the_template_reads(template: str, switch: str | None) -> None:
    assert reasoning_switch(template) == switch


def test_tags_of_transformers_are_read() -> None:
    template = "{%- generation %}{{ a }}{% endgeneration -%}{% for b in c %}{% break %}{% endfor %}"
    assert template_variables(template) == {"a", "c"}


def test_a_text_that_is_no_template_has_none() -> None:
    assert template_variables("{% if %}{{ a }}") == frozenset()
