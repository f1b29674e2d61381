"""ParserGrammarConformance judges what an output says by the rules and by the format."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from engine.testing.parser_grammars import RULES, ParserGrammarConformance
from engine.testing.parsers import Answer, Call


@pytest.mark.parametrize(
    ("rules", "max_calls", "calls", "verdict"),
    [
        ("strict", None, 3, nullcontext()),
        ("strict", 2, 2, nullcontext()),
        ("strict", 2, 3, pytest.raises(AssertionError, match="3 calls, not at most 2")),
        ("strict, one call", None, 1, nullcontext()),
        ("strict, one call", None, 2, pytest.raises(AssertionError, match="2 calls, not at most 1")),
        ("strict, one call", 2, 2, pytest.raises(AssertionError, match="2 calls, not at most 1")),
        ("named", 2, 2, pytest.raises(AssertionError, match="2 calls, not at most 1")),
    ],
)
def test_the_suite_counts_calls_by_the_rules_and_by_the_format(
    rules: str, max_calls: int | None, calls: int, verdict: AbstractContextManager[object]
) -> None:
    class Suite(ParserGrammarConformance):
        pass

    Suite.max_calls = max_calls
    call = Call("city", '{"city": "Rome", "n": 1}', complete=True)
    with verdict:
        Suite().check_answer(RULES[rules], Answer(calls=[call] * calls), "an output")
