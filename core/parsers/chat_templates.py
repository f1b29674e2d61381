"""What can be read from the source of a chat template: its syntax errors, and the variables for reasoning."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import nodes

EFFORT = "reasoning_effort"
"""Variable of chat templates that says how much to reason."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn reasoning on and off: of Qwen, GLM and most others; of DeepSeek V3.1 and Granite."""

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags of transformers' own, which mark the assistant's text for training."""


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads and does not only set; none of a text that is no template."""
    import jinja2
    import jinja2.meta

    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_parse(template)))
    except jinja2.TemplateSyntaxError:
        return frozenset()


def syntax_error(template: str) -> str | None:
    """Line and reason of the first syntax error of a chat template; None: there is none."""
    import jinja2

    try:
        _parse(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


def _parse(template: str) -> nodes.Template:
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION.sub("", template))


def reasoning_switch(template: str) -> str | None:
    """The variable that turns reasoning on and off; None: the template has none."""
    return next((name for name in SWITCHES if name in template_variables(template)), None)
