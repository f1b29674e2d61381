"""Keeps the proposals for one request within its grammar, and proposes what the grammar forces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from engine.core.errors import EngineError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher

log = logging.getLogger(__name__)


class GrammarDrafts:
    """Follows the output of one request through its grammar, in the engine process.

    A proposal ends before the first token that the grammar refuses there, since no step would accept it. Where the
    grammar allows one text only, its tokens are proposed even if nothing else is: names and punctuation of JSON.

    After a failure of the grammar nothing is proposed for the request any more.
    """

    def __init__(self, request_id: str, compiled: Future[CompiledGrammar]) -> None:
        """compiled: until it is done, proposals are left as they are."""
        self._request_id = request_id
        self._compiled = compiled
        self._matcher: GrammarMatcher | None = None
        self._known = 0
        """Tokens of the output that the matcher has accepted."""
        self._next: Sequence[int] | None = None
        """What the grammar forces after these; None: it was not asked."""
        self._failed = False
        self.proposed = False
        """Whether the latest proposal was what the grammar forces."""

    def choose(self, output: Sequence[int], proposal: Sequence[int], limit: int) -> Sequence[int]:
        """The tokens of a proposal up to the first that the grammar refuses, or those that it forces if these are more.

        output: so far; grows between calls, and never changes otherwise. limit: maximum tokens to propose.
        """
        self.proposed = False
        if self._failed:
            return ()
        if self._matcher is None and not self._compiled.done():
            return proposal
        try:
            return self._choose(output, proposal, limit)
        except Exception as error:  # of a library, or of a grammar that has become too complex
            log.warning("nothing is proposed any more for request %s, whose grammar fails: %s", self._request_id, error)
            self._failed = True
            return ()

    def _choose(self, output: Sequence[int], proposal: Sequence[int], limit: int) -> Sequence[int]:
        matcher = self._advance(output)
        allowed = proposal[: matcher.count_allowed(proposal)] if proposal else ()
        if len(allowed) == limit:
            return allowed
        if self._next is None:
            self._next = matcher.forced_tokens()
        self.proposed = len(self._next) > len(allowed)
        return self._next[:limit] if self.proposed else allowed

    def _advance(self, output: Sequence[int]) -> GrammarMatcher:
        """The matcher after the output."""
        if self._matcher is None:
            self._matcher = self._compiled.result().matcher()
        while self._known < len(output):
            token = output[self._known]
            if not self._matcher.accept(token):
                raise EngineError(f"token {token} came after {self._known} tokens, where it may not")
            self._known += 1
            self._next = None
        return self._matcher
