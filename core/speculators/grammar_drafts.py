"""Keeps the proposals for one request within its grammar, and proposes what the grammar forces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from engine.core.errors import EngineError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.plugin_host.faults import raise_interrupt, said

log = logging.getLogger(__name__)

TOKENS_PER_PAUSE = 32
"""Finding forced tokens takes time in proportion to their number: where the output has other tokens for the same text,
the grammar is asked again only after one token of output per this many forced tokens."""


class GrammarDrafts:
    """Follows the output of one request through its grammar, in the engine process.

    A proposal ends before the first token that the grammar refuses there, since no step would accept it. Where the
    grammar allows one text only, its tokens are proposed even if nothing else is: names and punctuation of JSON.

    After a failure of the grammar nothing is proposed for the request any more.
    """

    def __init__(self, request_id: str, compiled: Future[CompiledGrammar], owner: str) -> None:
        """compiled: until it is done, proposals are left as they are. owner: the plugin that compiled it, as errors
        name it."""
        self._request_id = request_id
        self._owner = owner
        self._compiled = compiled
        self._matcher: GrammarMatcher | None = None
        self._known = 0
        """Tokens of the output that the matcher has accepted."""
        self._forced: Sequence[int] = ()
        """The tokens that the grammar forces, from an earlier token of the output on."""
        self._followed = 0
        """How many of the forced tokens are in the output."""
        self._ask_at = 0
        """Length of the output from which on the grammar is asked again, once all that it forced is in the output."""
        self._failed = False
        self.proposed = False
        """Whether the latest proposal was the forced tokens."""

    def choose(self, output: Sequence[int], proposal: Sequence[int], limit: int) -> Sequence[int]:
        """The tokens of a proposal up to the first that the grammar refuses, or the forced tokens if they are more.

        output: so far; grows between calls, and never changes otherwise. limit: maximum tokens to propose.
        """
        self.proposed = False
        if self._failed:
            return ()
        if self._matcher is None and not self._compiled.done():
            return proposal
        try:
            return self._choose(output, proposal, limit)
        except BaseException as error:  # of a plugin, or of a grammar that has become too complex
            raise_interrupt(error)
            log.warning(
                "nothing is proposed any more for request %s, whose grammar, of %s, fails: %s",
                self._request_id,
                self._owner,
                error if isinstance(error, EngineError) else f"{type(error).__name__}: {said(error)}",
                exc_info=None if isinstance(error, EngineError) else error,
            )
            self._failed = True
            return ()

    def _choose(self, output: Sequence[int], proposal: Sequence[int], limit: int) -> Sequence[int]:
        matcher = self._advance(output)
        allowed = proposal[: matcher.count_allowed(proposal)] if proposal else ()
        if len(allowed) == limit:
            return allowed
        if self._followed == len(self._forced) and self._known >= self._ask_at:
            self._forced, self._followed, self._ask_at = matcher.forced_tokens(), 0, self._known + 1
        forced = self._forced[self._followed : self._followed + limit]
        self.proposed = len(forced) > len(allowed)
        return forced if self.proposed else allowed

    def _advance(self, output: Sequence[int]) -> GrammarMatcher:
        """The matcher after the output."""
        if self._matcher is None:
            self._matcher = self._compiled.result().matcher()
        while self._known < len(output):
            token = output[self._known]
            if not self._matcher.accept(token):
                raise EngineError(f"token {token} came after {self._known} tokens, where it may not")
            self._known += 1
            if self._followed == len(self._forced):
                continue
            if token == self._forced[self._followed]:
                self._followed += 1
            else:
                self._ask_at = self._known + len(self._forced) // TOKENS_PER_PAUSE
                self._forced, self._followed = (), 0
        return self._matcher
