"""Values of requests as objects of their types."""

from __future__ import annotations

import msgspec

from engine.core.protocols import without_unknown_nulls


class Part(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class Body(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    parts: list[Part] | None = None


def test_only_what_may_have_fields_is_searched_for_unknown_nulls() -> None:
    """A prompt may have a million numbers."""
    prompt = [1, 2, [3]]
    found = without_unknown_nulls({"prompt": prompt, "parts": [{"text": "a", "x": None}], "y": None}, Body)
    assert found == {"prompt": prompt, "parts": [{"text": "a"}]}
    assert isinstance(found, dict)
    assert found["prompt"] is prompt
