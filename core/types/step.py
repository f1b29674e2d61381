"""Step: what the engine sends to the runner for one batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from attrs import field, frozen

from engine.core.grammars.grammar import Grammar
from engine.core.tokens import Tokens
from engine.core.types.sampling_params import SamplingParams


def _tokens(value: Sequence[int]) -> Tokens:
    """An attrs converter: a sequence of token ids as Tokens."""
    return value if isinstance(value, Tokens) else Tokens(value)


@frozen(kw_only=True)
class NewSequence:
    """A sequence new to the runner. A request is a new sequence at each admission, also after a preemption."""

    sequence: int
    tokens: Tokens = field(converter=_tokens)
    """The prompt, followed by the output so far if the request was preempted."""
    prompt_len: int
    params: SamplingParams
    """Sampling parameters, with the seed set."""


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """Known tokens of one sequence to compute: `count` tokens from position `start` on."""

    sequence: int
    start: int
    """Tokens before `start` are computed: by this sequence, or by another that shares their blocks, in an earlier step
    or in an earlier chunk of this step. (Each layer writes the keys and values of all chunks before attention reads
    any.)"""
    count: int
    sample: bool
    """Whether to sample the next token after the chunk; False unless the chunk completes the prefill."""


class DraftSlice(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a decoding sequence to compute in one step: the token sampled last, and drafts that may follow it.

    A token is sampled after each of them. Drafts are accepted up to the first that differs from the token sampled in
    its place.
    """

    sequence: int
    start: int
    """Position of the token sampled last."""
    tokens: tuple[int, ...]
    """The token sampled last, then one draft or more."""


@frozen(kw_only=True)
class Step:
    """One batch for the runner: decodes, then prefill chunks, then draft slices.

    Of the state of sequences (tokens, block tables), a step holds only the changes since the step before.

    An executor sends it to every worker as msgpack (engine.core.executors.encode). A worker keeps the tokens and block
    table of each sequence between steps and applies the steps in order: `new`, `blocks` and `finished` say what
    changed.
    """

    id: int
    decodes: tuple[int, ...]
    """Sequences that decode: each computes the token sampled last and samples the next. The runner knows that token and
    its position, so that a step can be planned before the result of the previous step is known. The same tuple object
    as in the previous step if nothing changed."""
    chunks: tuple[PrefillChunk, ...]
    """Chunks of prompts, and of output to recompute after a preemption."""
    iterations: int = 1
    """Above 1 (a multi-step step, which has neither chunks nor drafts): repeat, feeding back each sampled token,
    without the scheduler."""
    drafts: tuple[DraftSlice, ...] = ()
    """Sequences that decode with drafts; they are not in `decodes`."""
    positions: tuple[tuple[int, int], ...] = ()
    """(sequence, position of its next token), for sequences that had drafts in an earlier step and may decode without
    drafts in this step or a later one: the runner does not track how many drafts were accepted. Draft slices have
    their own positions."""
    propose: int = 0
    """Maximum tokens that a speculator on the device proposes after the step, for each sequence that samples. 0: the
    speculator computes the step's tokens, but proposes none."""
    new: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(block table, KV blocks to append to it), for all iterations. The number of a table is sequence * kinds + kind,
    where `kinds` is the length of CacheInfo.kinds: with one kind, the number of the sequence. Each index of the table
    takes BlockKind.groups blocks. If the first number is -n, the blocks after it are for the indices from n on: the
    indices before n are behind the window of a cached prefix, or the blocks from n on held rejected drafts and were
    freed."""
    finished: tuple[int, ...] = ()
    """Sequences to forget before anything else is done; their blocks may belong to other sequences in this step."""
    grammars: tuple[Grammar, ...] = ()
    """Grammars that the engine began to compile since the step before. Workers begin to compile them now, so that they
    are ready when their sequences arrive."""

    @property
    def decode_rows(self) -> int:
        """Tokens that an iteration computes outside prefill chunks: one per decode, and those of the draft slices."""
        rows = len(self.decodes)
        return rows + sum([len(part.tokens) for part in self.drafts]) if self.drafts else rows

    @property
    def draft_sequences(self) -> tuple[int, ...]:
        """The sequence of each token of the draft slices."""
        return tuple([part.sequence for part in self.drafts for _ in part.tokens])
