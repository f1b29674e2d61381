"""The masks of sequences whose outputs must match a grammar, made where their tokens reach the host."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.errors import ExecutorError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.transfer import to_device
from engine.core.types import NO_TOKEN, NewSequence

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars
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
    """Tokens that the matcher has not accepted yet."""
    ending: Mask | None
    """The tokens that may not come before min_tokens, unless nothing else may; None: there are none."""
    min_tokens: int
    num_outputs: int = 0
    """Tokens that the matcher has accepted."""
    matcher: GrammarMatcher | None = None
    """None until the grammar is compiled, and the first mask due."""
    last: tuple[SampledTokens, int] | None = None
    """The token sampled last and its row, which the host may not have yet; None: it is in `tokens`."""
    failed: bool = False

    def advance(self) -> GrammarMatcher:
        """Accept the tokens; returns the matcher. Raises what compiling raised."""
        if self.matcher is None:
            self.matcher = self.compiled.result().matcher()
        for token in self.tokens:
            if token == NO_TOKEN or not self.matcher.accept(token):
                raise ExecutorError(f"token {token} came after {self.num_outputs} tokens, where it may not")
            self.num_outputs += 1
        self.tokens.clear()
        return self.matcher


class GrammarMasks:
    """Follows the sequences that have a grammar. Every rank does so for itself: all ranks see the same tokens, and no
    mask crosses a process.

    A mask is due only after the forward pass is launched, which overlaps with waiting for the token before.
    """

    def __init__(self, grammars: Grammars | None, vocab_size: int, device: torch.device) -> None:
        """grammars: None where sequences have no grammars, as in some tests."""
        self._grammars = grammars
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

    def fill(self, sequences: Sequence[int]) -> torch.Tensor:
        """The masks of the sequences' next tokens: [sequences, ceil(vocab / 32)] int32 on the device.

        Waits for the token before, which the device computes before the forward pass that is now in progress.
        A sequence that cannot go on may have no token: its logits are then not finite, which ends the request.
        """
        masks = np.zeros((len(sequences), self._words), np.int32)
        read: dict[int, list[int]] = {}
        ready: list[GrammarMatcher] = []
        rows: list[int] = []
        for row_of_mask, sequence in enumerate(sequences):
            output = self._outputs[sequence]
            if output.last is not None:
                sampled, row = output.last
                if id(sampled) not in read:
                    read[id(sampled)] = sampled.tokens_on_host()
                output.tokens.append(read[id(sampled)][row])
                output.last = None
            if not output.failed and (matcher := self._advance(sequence, output)) is not None:
                ready.append(matcher)
                rows.append(row_of_mask)
        self._fill(sequences, ready, rows, masks)
        [on_device] = to_device([masks], self._device)
        return on_device

    def note(self, rows: GrammarRows, sampled: SampledTokens) -> None:
        """Note where the tokens just sampled for these sequences will be."""
        for sequence, row in zip(rows.sequences, rows.host_rows, strict=True):
            self._outputs[sequence].last = sampled, row

    def _advance(self, sequence: int, output: _Output) -> GrammarMatcher | None:
        """The matcher of an output after its last token; None if it cannot go on."""
        try:
            return output.advance()
        except Exception as error:  # of a library, or of a grammar that is refused
            self._fail(sequence, error)
            return None

    def _fill(self, sequences: Sequence[int], ready: list[GrammarMatcher], rows: list[int], masks: Masks) -> None:
        """Fill the masks of matchers. rows: the row of each in `sequences` and `masks`."""
        classes = {type(matcher) for matcher in ready}
        if len(classes) > 1:
            for one in classes:
                chosen = [at for at, matcher in enumerate(ready) if type(matcher) is one]
                self._fill(sequences, [ready[at] for at in chosen], [rows[at] for at in chosen], masks)
            return
        if not ready:
            return
        filled = masks if len(rows) == len(masks) else np.zeros((len(rows), self._words), np.int32)
        for at, problem in enumerate(type(ready[0]).fill_batch(ready, filled)):
            sequence, mask = sequences[rows[at]], filled[at]
            output = self._outputs[sequence]
            if problem is not None:
                self._fail(sequence, problem)
                mask[:] = 0
            elif output.ending is not None and output.num_outputs < output.min_tokens:
                longer = mask & ~output.ending
                if longer.any():
                    mask[:] = longer
        if filled is not masks:
            masks[rows] = filled

    def _fail(self, sequence: int, error: Exception) -> None:
        log.warning("sequence %d cannot go on by its grammar: %s", sequence, error)
        self._outputs[sequence].failed = True

    def _mask_of(self, tokens: Collection[int]) -> Mask:
        allowed = np.zeros(32 * self._words, np.uint8)
        allowed[list(tokens)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)
