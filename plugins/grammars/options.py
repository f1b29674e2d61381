"""Options that the built-in grammar backends share."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class JsonOptions:
    """Options of llguidance and xgrammar, [grammar.options]."""

    max_whitespace: int = field(default=16)
    """Maximum spaces, tabs and line ends in one place between the parts of JSON. 0: compact JSON, without any. Without
    a bound, a model may go on with spaces forever."""

    @max_whitespace.validator
    def _check(self, _: Any, value: int) -> None:
        if not 0 <= value <= 1000:
            raise ValueError(f"max_whitespace is {value}; give a number from 0 to 1000")
