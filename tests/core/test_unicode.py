from __future__ import annotations

import json

from hypothesis import given, settings, strategies as st

from engine.core.unicode import without_lone_surrogates


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_valid_json_is_not_changed_by_mending_surrogates(text: str) -> None:
    data = json.dumps([text, "\\\U0001f600"]).encode()
    assert without_lone_surrogates(data) == data
