"""The masks of sequences whose outputs must match a grammar, made where their tokens reach the host."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.errors import EngineError, ExecutorError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.plugin_host.faults import raise_interrupt, said
from engine.core.transfer import to_device
from engine.core.types import NO_TOKEN, NewSequence

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.sampled_tokens import SampledTokens
    from engine.core.sampling.sampling_batch import GrammarRows

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.int32]
Masks = npt.NDArray[np.int32]


@define(eq=False)
class _Output:
    """The output of one sequence, followed through its grammar."""

    compiled: Future[CompiledGrammar]
    tokens: list[int]
    """The output, as far as the host has it."""
    ending: Mask | None
    """The tokens that may not come before min_tokens, unless nothing else may; None: there are none."""
    min_tokens: int
    num_accepted: int = 0
    """Tokens that the matcher has accepted, without drafts to be rolled back."""
    matcher: GrammarMatcher | None = None
    """None until the grammar is compiled and the first mask is due, and after a failure amid drafts."""
    last: tuple[SampledTokens, int, tuple[int, ...]] | None = None
    """The tokens sampled last, which the host may not have yet; their first row; the drafts that they verified. None:
    the tokens are in `tokens`."""
    failed: bool = False

    def read(self, sampled: Sequence[int], row: int, drafts: tuple[int, ...]) -> None:
        """Append the tokens sampled last, up to the first that differs from the draft in its place."""
        for token, draft in zip(sampled[row:], (*drafts, None), strict=False):
            self.tokens.append(token)
            if token != draft:
                break
        self.last = None

    def advance(self) -> GrammarMatcher:
        """Accept the tokens; returns the matcher. Raises what compiling raised."""
        if self.matcher is None:
            self.matcher, self.num_accepted = self.compiled.result().matcher(), 0
        for token in self.tokens[self.num_accepted :]:
            if token == NO_TOKEN or not self.matcher.accept(token):
                raise ExecutorError(f"token {token} came after {self.num_accepted} tokens, where it may not")
            self.num_accepted += 1
        return self.matcher


@define(eq=False)
class _Walk:
    """A matcher's progress along the rows of a sequence: one row after the last token, then one after each draft."""

    sequence: int
    output: _Output
    matcher: GrammarMatcher
    first: int
    """First row of the masks."""
    drafts: tuple[int, ...]
    taken: int = 0
    """Drafts that the matcher has accepted."""

    @property
    def row(self) -> int:
        """The row whose mask is due."""
        return self.first + self.taken

    def go_on(self) -> bool:
        """Accept the next draft; False if there is none, or the grammar refuses it."""
        if self.taken == len(self.drafts) or not self.matcher.accept(self.drafts[self.taken]):
            return False
        self.taken += 1
        return True


class GrammarMasks:
    """Follows the sequences that have a grammar. Every rank makes its own masks: all ranks see the same tokens, so no
    mask is sent between processes.

    A mask is due only after the forward pass is launched, which overlaps with waiting for the token before.

    The rows of a draft slice have the masks after each of its drafts, up to the first draft that the grammar refuses:
    another token is sampled in its place, so the rows after it, which allow no token, do not count. The matchers then
    roll the drafts back; accepted drafts come again with the next mask.
    """

    def __init__(self, grammars: Grammars | None, vocab_size: int, device: torch.device) -> None:
        """grammars: None where sequences have no grammars, as in some tests."""
        self._grammars = grammars
        self._owner = "" if grammars is None else grammars.owner
        self._words = -(-vocab_size // 32)
        self._device = device
        self._outputs: dict[int, _Output] = {}

    def add(self, new: NewSequence, ending: Collection[int]) -> None:
        """Add a sequence with a grammar, and begin to compile the grammar. ending: tokens that end its output."""
        if new.params.grammar is None or self._grammars is None:
            raise ExecutorError(f"sequence {new.sequence} has no grammar, or the runner cannot compile any")
        self._outputs[new.sequence] = _Output(
            compiled=self._grammars.begin(new.params.grammar),
            tokens=list(new.tokens[new.prompt_len :]),
            ending=self._mask_of(ending) if ending and new.params.min_tokens else None,
            min_tokens=new.params.min_tokens,
        )

    def remove(self, sequence: int) -> None:
        """Forget a sequence, if it is known."""
        self._outputs.pop(sequence, None)

    def fill(self, sequences: Sequence[int], drafts: DraftRows | None = None) -> torch.Tensor:
        """The masks of some rows: [rows, ceil(vocab / 32)] int32 on the device.

        sequences: by row, those of a draft slice one after the other. drafts: None if no row verifies drafts.

        Waits for the token before, which the device computes before the forward pass that is now in progress.
        If a sequence cannot go on, its mask allows no token: its logits are then not finite, which ends the request.
        """
        masks = np.zeros((len(sequences), self._words), np.int32)
        drafts_of = _drafts_by_sequence(drafts)
        read: dict[int, list[int]] = {}
        walks: list[_Walk] = []
        first = 0
        for sequence, rows in groupby(sequences):
            output, count = self._outputs[sequence], len(list(rows))
            if output.last is not None:
                sampled, row, verified = output.last
                if id(sampled) not in read:
                    read[id(sampled)] = sampled.tokens_on_host()
                output.read(read[id(sampled)], row, verified)
            if not output.failed and (matcher := self._advance(sequence, output)) is not None:
                walks.append(_Walk(sequence, output, matcher, first, drafts_of.get(sequence, ())))
            first += count
        self._fill(walks, masks)
        if drafts_of:
            self._fill_drafts(walks, masks)
        [on_device] = to_device([masks], self._device)
        return on_device

    def note(self, rows: GrammarRows, sampled: SampledTokens, drafts: DraftRows | None = None) -> None:
        """Note where the tokens just sampled for these sequences will be."""
        drafts_of = _drafts_by_sequence(drafts)
        for sequence, row in zip(reversed(rows.sequences), reversed(rows.host_rows), strict=True):
            self._outputs[sequence].last = sampled, row, drafts_of.get(sequence, ())  # reversed: its first row stays

    def _advance(self, sequence: int, output: _Output) -> GrammarMatcher | None:
        """The matcher of an output after its last token; None if it cannot go on."""
        try:
            return output.advance()
        except BaseException as error:  # of a plugin, or of a grammar that is refused
            self._fail(sequence, "matcher" if output.matcher is None else "accept", error)
            return None

    def _fill_drafts(self, walks: Sequence[_Walk], masks: Masks) -> None:
        """Fill the masks of the rows after drafts: in each round those after one more draft of each sequence."""
        going = drafted = [walk for walk in walks if walk.drafts and not walk.output.failed]
        while going:
            going = [walk for walk in going if self._go_on(walk)]
            self._fill(going, masks)
            going = [walk for walk in going if walk.output.matcher is not None]
        for walk in drafted:
            if walk.output.matcher is None or not walk.taken:
                continue
            try:
                walk.matcher.rollback(walk.taken)
            except BaseException as error:
                self._fail_amid_drafts(walk, "rollback", error)

    def _go_on(self, walk: _Walk) -> bool:
        """Accept the next draft of a sequence; False if its masks end here."""
        try:
            return walk.go_on()
        except BaseException as error:
            self._fail_amid_drafts(walk, "accept", error)
            return False

    def _fill(self, walks: list[_Walk], masks: Masks) -> None:
        """Fill the mask that is due in each walk."""
        classes = {type(walk.matcher) for walk in walks}
        if len(classes) > 1:
            for one in classes:
                self._fill([walk for walk in walks if type(walk.matcher) is one], masks)
            return
        if not walks:
            return
        all_rows = len(walks) == len(masks)
        filled = masks if all_rows else np.zeros((len(walks), self._words), np.int32)
        for walk, mask, problem in zip(walks, filled, self._fill_batch(walks, filled), strict=True):
            output = walk.output
            if problem is not None:
                mask[:] = 0
                if walk.taken:
                    self._fail_amid_drafts(walk, "fill_mask", problem)
                else:
                    self._fail(walk.sequence, "fill_mask", problem)
            elif output.ending is not None and output.num_accepted + walk.taken < output.min_tokens:
                longer = mask & ~output.ending
                if longer.any():
                    mask[:] = longer
        if not all_rows:
            masks[[walk.row for walk in walks]] = filled

    def _fill_batch(self, walks: list[_Walk], masks: Masks) -> Sequence[BaseException | None]:
        """Fill the masks of matchers of one class; returns for each what it raised, or None."""
        matchers = [walk.matcher for walk in walks]
        try:
            problems = type(matchers[0]).fill_batch(matchers, masks)
            if len(problems) == len(walks):
                return problems
            raise ExecutorError(f"fill_batch() answers for {len(problems)} matchers of {len(walks)}")
        except BaseException as error:
            return [error] * len(walks)

    def _fail_amid_drafts(self, walk: _Walk, method: str, error: BaseException) -> None:
        """Drop a matcher that may be unusable. If the output differs from the drafts, a new matcher follows it; if not,
        no token can be sampled."""
        self._log(f"sequence {walk.sequence}, after {walk.taken} draft tokens,", method, error)
        walk.output.matcher = None

    def _fail(self, sequence: int, method: str, error: BaseException) -> None:
        self._log(f"sequence {sequence}", method, error)
        self._outputs[sequence].failed = True

    def _log(self, sequence: str, method: str, error: BaseException) -> None:
        """Log why a sequence cannot go on, with a traceback of what a plugin raised by mistake.

        Raises `error` if a signal raised it, as Ctrl-C does.
        """
        raise_interrupt(error)
        if isinstance(error, EngineError):
            log.warning("%s cannot go on by its grammar, of %s: %s", sequence, self._owner, error)
        else:
            what = f"{type(error).__name__}: {said(error)}"
            log.error("%s cannot go on: %s failed in %s(): %s", sequence, self._owner, method, what, exc_info=error)

    def _mask_of(self, tokens: Collection[int]) -> Mask:
        allowed = np.zeros(32 * self._words, np.uint8)
        allowed[list(tokens)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)


def _drafts_by_sequence(drafts: DraftRows | None) -> dict[int, tuple[int, ...]]:
    if drafts is None:
        return {}
    return {part.sequence: part.tokens[1:] for part in drafts.slices}
