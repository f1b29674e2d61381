"""The table of token counts grows and shrinks with the number of sequences that have penalties."""

from __future__ import annotations

import torch

from engine.core.sampling.token_counts import TokenCounts
from engine.core.types import NewSequence, SamplingParams

from .reference import VOCAB


def test_slots_keep_their_places_when_the_table_grows() -> None:
    counts = TokenCounts(VOCAB, 64, torch.device("cpu"))
    slots = []
    for number in range(40):
        new = NewSequence(sequence=number, tokens=(number,), prompt_len=1, params=SamplingParams(presence_penalty=1.0))
        before = [slot.index for slot in slots]
        slots.append(counts.add(new))
        assert [slot.index for slot in slots[:-1]] == before
