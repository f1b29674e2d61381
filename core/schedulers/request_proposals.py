"""What is proposed for one request: by its own prediction, the speculator and its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.schedulers.request_state import RequestState
from engine.core.speculators.base import SpeculatedSequence
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.grammar_drafts import GrammarDrafts
from engine.core.speculators.predicted_output import PredictedOutput

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars


class RequestProposals:
    """The proposals for one request.

    The speculator is asked only where the request's own prediction proposes nothing. The request's grammar cuts either
    proposal at the first token that it refuses, or replaces it by the tokens that it forces, if these are more.

    learns: whether `learn` has an effect.
    """

    __slots__ = ("_grammar", "_prediction", "_sequence", "_speculator", "_state", "learns")

    def __init__(
        self, state: RequestState, speculator: CheckedSpeculator | DeviceProposals, grammars: Grammars | None
    ) -> None:
        """grammars: compiles the request's grammar; None: proposals ignore it."""
        self._state = state
        self._speculator = speculator
        self._sequence = SpeculatedSequence(
            request_id=state.id,
            tokens=state.tokens,
            prompt_length=state.prompt_len,
            tenant=state.request.salt or None,
        )
        self._prediction = PredictedOutput(state.request.prediction) if state.request.prediction else None
        self._grammar: GrammarDrafts | None = None
        if state.params.grammar is not None and grammars is not None:
            self._grammar = GrammarDrafts(state.id, grammars.begin(state.params.grammar), grammars.owner)
        self.learns = speculator.learns or self._prediction is not None

    def propose(self, limit: int) -> Sequence[int]:
        """At most `limit` tokens to follow the newest one; empty: there is no proposal."""
        found: Sequence[int] = ()
        if self._prediction is not None:
            found = self._prediction.propose(self._state.output, limit)
        if not found:
            found = self._speculator.propose(self._sequence, limit)
        if self._grammar is not None:
            found = self._grammar.choose(self._state.output, found, limit)
        return found

    def learn(self, verified: int, tokens: tuple[int, ...]) -> None:
        """Report how the latest proposal fared to what has made it.

        verified: number of drafts. tokens: the accepted drafts and the token after them, not yet appended.
        """
        if self._grammar is not None and self._grammar.proposed:
            return
        if self._prediction is not None and self._prediction.proposed:
            self._state.count_prediction(tokens, verified)
        elif self._speculator.learns:
            self._speculator.accepted(self._state.id, verified, len(tokens) - 1)
