"""What steps are called."""

from __future__ import annotations

import pytest

from engine.core.timeline.names import step_args, step_name
from engine.core.types import DraftSlice, PrefillChunk, Step

CHUNK = PrefillChunk(3, 0, 20, True)
DRAFTS = (DraftSlice(1, 9, (4, 5, 6)), DraftSlice(2, 9, (4, 5)))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ({"decodes": (1, 2)}, "decode 2"),
        ({"decodes": (1, 2), "iterations": 4}, "decode 2 x 4"),
        ({"chunks": (CHUNK,)}, "prefill 20 tokens"),
        ({"decodes": (1,), "chunks": (CHUNK,)}, "mixed 1 decodes + 20 tokens"),
        ({"drafts": DRAFTS}, "verify 3 drafts, 2 decodes"),
        ({"decodes": (7,), "chunks": (CHUNK,), "drafts": DRAFTS}, "verify 3 drafts, 3 decodes + 20 tokens"),
        ({}, "update"),
    ],
)
def test_step_is_named_by_what_it_computes(step: dict[str, object], name: str) -> None:
    assert step_name(Step(**{"id": 1, "decodes": (), "chunks": (), **step})) == name


def test_facts_of_a_step_include_its_drafts() -> None:
    facts = step_args(Step(id=1, decodes=(7,), chunks=(CHUNK,), drafts=DRAFTS))
    assert facts == {"step": 1, "decodes": 3, "drafts": 3, "prefill_chunks": 1, "prefill_tokens": 20}
