"""What generation keeps of a request's outputs."""

from __future__ import annotations

from collections.abc import Sized

import attrs

from engine.core import Request, SamplingParams
from engine.core.generation import _Collector
from engine.core.text.detokenizer import TextDelta
from engine.core.types import Output, TokenLogprobs


def test_collecting_an_output_copies_nothing_that_was_collected_before() -> None:
    """Otherwise a text of N tokens would take time quadratic in N."""
    collector = _Collector(Request(id="a", prompt=(1, 2), params=SamplingParams(logprobs=0)))
    entries = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in range(4))
    kept = None
    for token, letter in enumerate("abcd"):
        finish_reason = "length" if letter == "d" else None
        output = Output(request="a", tokens=(token,), logprobs=(entries[token],), finish_reason=finish_reason)
        delta = TextDelta(
            text=letter, tokens=output.tokens, logprobs=output.logprobs, finish_reason=output.finish_reason
        )
        collector.add(output, delta)
        held = [getattr(collector, field.name) for field in attrs.fields(_Collector)]
        containers = [id(one) for one in held if isinstance(one, Sized)]
        assert kept in (None, containers)
        kept = containers
    assert collector.completion is not None
    assert (collector.completion.text, collector.completion.token_ids) == ("abcd", (0, 1, 2, 3))
    assert collector.completion.logprobs == entries
