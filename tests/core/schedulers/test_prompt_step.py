"""The step of whole prompts that runs before the first request."""

from __future__ import annotations

import itertools

import pytest

from engine.core.schedulers.prompt_step import prompt_step
from engine.core.types import FULL, BlockKind, PrefillChunk

TWO_KINDS = (BlockKind(name="full", groups=2), BlockKind(name="window 8", window=8, groups=1))


@pytest.mark.parametrize("first", [0, 1])
def test_each_prompt_is_one_chunk_that_samples(first: int) -> None:
    step = prompt_step([24, 16, 1], [FULL], 16, first=first)
    assert (step.id, step.decodes, step.finished) == (0, (), ())
    assert step.chunks == tuple(PrefillChunk(first + i, 0, count, True) for i, count in enumerate((24, 16, 1)))
    assert [(one.sequence, one.tokens, one.prompt_len) for one in step.new] == [
        (first, (0,) * 24, 24),
        (first + 1, (0,) * 16, 16),
        (first + 2, (0,), 1),
    ]
    assert {(one.params.temperature, one.params.seed) for one in step.new} == {(0.0, 0)}
    assert step.blocks == ((first, (0, 1)), (first + 1, (2,)), (first + 2, (3,)))


def test_each_kind_has_a_table_per_prompt_and_no_block_is_in_two() -> None:
    step = prompt_step([24, 16], TWO_KINDS, 16, first=1)
    assert [(table, len(blocks)) for table, blocks in step.blocks] == [(2, 4), (3, 2), (4, 2), (5, 1)]
    assert list(itertools.chain.from_iterable(blocks for _, blocks in step.blocks)) == list(range(9))


def test_no_prompt_is_an_empty_step() -> None:
    step = prompt_step([], TWO_KINDS, 16)
    assert (step.chunks, step.new, step.blocks) == ((), (), ())
