"""Limits on what XGrammar is given: nothing else bounds its time to compile a grammar, or to make a mask.

With more, measured with 128,000 tokens: `a?` 3000 times and `a` 3000 times take more than 20 s to compile, and a mask
of `((a{1,100}){1,100}){1,100}` takes 360 ms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.core.errors import InvalidRequestError

MAX_COUNT = 4096
"""Maximum repetitions of anything: in an expression, of items, of the characters of a string."""
MAX_STATES = 4096
"""Maximum characters of an expression, each counted as often as it is repeated."""
MAX_LOOPS = 128
"""Maximum quantifiers of an expression, each counted as often as the groups around it are repeated."""
MAX_NESTED_COUNTS = 2**16
"""Maximum product of the bounds of arrays that nest, and of the strings in them."""
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_expression(pattern: str) -> None:
    """Raise InvalidRequestError for an expression that may take long."""
    stack: list[list[tuple[int, int]]] = [[]]  # of each open group, the states and loops of its parts
    for piece in _PIECE.finditer(pattern):
        parts = stack[-1]
        if piece[0] == "(":
            stack.append([])
        elif piece[0] == ")" and len(stack) > 1:
            group = stack.pop()
            stack[-1].append((sum(states for states, _ in group), sum(loops for _, loops in group)))
        elif piece[0] in "*+?" or piece[1] is not None:
            times = 1 if piece[1] is None else int(piece[2] or piece[1])
            if times > MAX_COUNT:
                raise _refusal(f"{piece[0]} in the pattern {pattern[:100]!r}; at most {MAX_COUNT} times")
            if parts:
                states, loops = parts.pop()
                parts.append((states * times, loops * times + 1))
        else:
            parts.append((1, 0))
    states, loops = (sum(part[at] for group in stack for part in group) for at in (0, 1))
    if states > MAX_STATES or loops > MAX_LOOPS:
        raise _refusal(
            f"the pattern {pattern[:100]!r}, which is too complex: written out it has {states} characters and {loops} "
            f"quantifiers; at most {MAX_STATES} and {MAX_LOOPS}"
        )


def check_counts(schema: Any, product: int = 1) -> None:
    """Raise InvalidRequestError for bounds of arrays and strings that may take long. product: of the arrays around."""
    if isinstance(schema, list):
        for one in schema:
            check_counts(one, product)
        return
    if not isinstance(schema, Mapping):
        return
    own = 1
    for name in ("maxItems", "maxLength", "minItems", "minLength"):
        count = schema.get(name)
        if isinstance(count, int):
            if count > MAX_COUNT:
                raise _refusal(f"{name} {count}; at most {MAX_COUNT}")
            own = max(own, count)
    if product * own > MAX_NESTED_COUNTS:
        raise _refusal(f"maxItems and maxLength that nest to more than {MAX_NESTED_COUNTS}")
    for name, value in schema.items():
        if name not in ("const", "enum", "default", "examples"):
            inside = value.values() if name in ("$defs", "definitions", "properties") else [value]
            for one in inside if isinstance(value, (Mapping, list)) else ():
                check_counts(one, product * own)


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"xgrammar does not take {what}", "grammar")
