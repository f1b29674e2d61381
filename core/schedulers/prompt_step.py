"""Steps of prompts that no scheduler planned: the start measures the memory of one, and the rehearsal runs some."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from engine.core.types import BlockKind, NewSequence, PrefillChunk, SamplingParams, Step

STEP = 0
"""Number of the steps before the first request; the scheduler's begin with 1."""
SEQUENCE = 0
"""Number of the first sequence of these steps; the scheduler's begin with 1."""
SHORT_PROMPTS = (32, 128, 512)
"""Tokens of prompts that are neither few tokens nor a full step: attention backends may have other kernels for them."""


def prompt_step(lengths: Iterable[int], kinds: Sequence[BlockKind], block_size: int, *, first: int = 0) -> Step:
    """A step that computes one whole prompt per length and samples its next token greedily.

    lengths: tokens of the prompts, all of them token 0. first: number of the first sequence. The blocks are numbered
    from 0, and no two block tables share one.
    """
    params = SamplingParams(temperature=0.0, seed=0)
    free = itertools.count()
    prompts, blocks = [], []
    for sequence, length in enumerate(lengths, first):
        prompts.append(NewSequence(sequence=sequence, tokens=(0,) * length, prompt_len=length, params=params))
        indices = -(-length // block_size)
        for table, kind in enumerate(kinds, sequence * len(kinds)):
            blocks.append((table, tuple(itertools.islice(free, indices * kind.groups))))
    chunks = tuple(PrefillChunk(one.sequence, 0, one.prompt_len, True) for one in prompts)
    return Step(id=STEP, decodes=(), chunks=chunks, new=tuple(prompts), blocks=tuple(blocks))


def chunked_prompt_steps(length: int, kinds: Sequence[BlockKind], block_size: int, *, propose: int = 0) -> list[Step]:
    """Steps that compute one prompt in two chunks, the first of one token, and sample its next token greedily.

    Attention backends may have another kernel for few tokens. The blocks have room for one generated token. propose:
    Step.propose.
    """
    params = SamplingParams(temperature=0.0, seed=0)
    prompt = NewSequence(sequence=SEQUENCE, tokens=(0,) * length, prompt_len=length, params=params)
    indices, free = -(-(length + 1) // block_size), itertools.count()
    tables = tuple(tuple(itertools.islice(free, indices * kind.groups)) for kind in kinds)
    blocks = tuple((SEQUENCE * len(tables) + number, table) for number, table in enumerate(tables))
    first = PrefillChunk(SEQUENCE, 0, 1, length == 1)
    steps = [Step(id=STEP, decodes=(), chunks=(first,), new=(prompt,), blocks=blocks, propose=propose)]
    if length > 1:
        rest = PrefillChunk(SEQUENCE, 1, length - 1, True)
        steps.append(Step(id=STEP, decodes=(), chunks=(rest,), propose=propose))
    return steps
