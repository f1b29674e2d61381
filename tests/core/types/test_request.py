"""Request: each field accepts its type in the usual forms, and refuses others with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core import Request
from engine.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": 5}, "id must be a string, not 5"),
        ({"prompt": "text"}, "prompt must be a tuple of token ids, not 'text'"),
        ({"prompt": None}, "prompt must be a tuple of token ids, not None"),
        ({"params": {"max_tokens": 3}}, "params must be SamplingParams(...), not {'max_tokens': 3}"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": True}, "priority must be a whole number, not True"),
        ({"salt": None}, "salt must be a string, not None"),
        ({"salt": "\ud800"}, "the salt has half of a surrogate pair, so it is not Unicode"),
        ({"id": "a\udc00"}, "the id has half of a surrogate pair, so it is not Unicode"),
        ({"cache_key": "\ud800"}, "the cache_key has half of a surrogate pair, so it is not Unicode"),
    ],
)
def test_requests_refuse_wrong_values(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request(**{"id": "a", "prompt": (1, 2), **given})
    assert str(caught.value) == said
    assert caught.value.parameter == next(iter(given))


def test_prompt_of_a_request_may_be_a_list() -> None:
    assert Request(id="a", prompt=[1, 2]) == Request(id="a", prompt=(1, 2))  # type: ignore[arg-type]
