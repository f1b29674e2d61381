"""Calls a speculator and validates its answers; where it fails, there is no proposal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.core.plugin_host.counted_faults import CountedFaults, InvalidAnswerError
from engine.core.plugin_host.faults import blame, expect
from engine.core.plugin_host.installed import OBJECT, describe_plugin
from engine.core.speculators.base import SpeculatedSequence, Speculator, SpeculatorSpec

_log = logging.getLogger(__name__)
_REHEARSAL = "rehearsal"


class CheckedSpeculator:
    """A speculator whose proposals are valid: at most as many tokens as asked for, all of the vocabulary.

    A speculator that raises, or makes an invalid proposal, cannot stop the engine: there is no proposal, the fault is
    counted in `faults`, and the first fault of each method is logged. The speculator is asked again in a later step.

    learns: whether the speculator overrides `accepted`; otherwise `accepted` need not be called.
    """

    def __init__(self, speculator: Speculator[Any], spec: SpeculatorSpec) -> None:
        """spec: what the speculator was made for."""
        self.spec = spec
        self._speculator = speculator
        self._propose = speculator.propose
        self._vocab_size = spec.vocab_size
        cls = type(speculator)
        self._owner: str = getattr(cls, "plugin_owner", describe_plugin("speculator", cls.__qualname__, OBJECT))
        metric = "engine_speculator_faults_total"
        self._faults = CountedFaults(self._owner, _log, instead="nothing is proposed", metric=metric)
        self.learns = cls.accepted is not Speculator.accepted

    @property
    def faults(self) -> int:
        """Calls in which the speculator failed."""
        return self._faults.count

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        """A valid proposal of at most `limit` tokens; empty: there is none."""
        try:
            answer = self._propose(sequence, limit)
            problem = _problem(answer, limit, self._vocab_size)
            if problem is None:
                return answer
            self._faults.add("propose", InvalidAnswerError(answer, problem))
        except BaseException as error:
            self._faults.add("propose", error)
        return ()

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        """Report how many tokens of a proposal were verified, and how many of these were accepted."""
        try:
            self._speculator.accepted(request_id, verified, accepted)
        except BaseException as error:
            self._faults.add("accepted", error)

    def finished(self, request_id: str) -> None:
        """Report that a request has ended."""
        try:
            self._speculator.finished(request_id)
        except BaseException as error:
            self._faults.add("finished", error)

    def rehearse(self) -> None:
        """Call each method once, for a request that does not exist.

        Raises PluginFaultError or PluginError, naming the plugin, for a fault that the first request would meet.
        """
        tokens = [number % min(self._vocab_size, 3) for number in range(min(self.spec.max_len, 12))]
        sequence = SpeculatedSequence(request_id=_REHEARSAL, tokens=tokens, prompt_length=len(tokens))
        limit = self.spec.max_drafts
        with blame(self._owner, "propose()"):
            answer = self._propose(sequence, limit)
            problem = _problem(answer, limit, self._vocab_size)
        expect(problem is None, self._owner, "propose()", answer, problem or "")
        with blame(self._owner, "accepted()"):
            self._speculator.accepted(_REHEARSAL, len(answer), 0)
        with blame(self._owner, "finished()"):
            self._speculator.finished(_REHEARSAL)


def _problem(answer: object, limit: int, vocab_size: int) -> str | None:
    """What a proposal is not; None for a valid one."""
    if not isinstance(answer, (tuple, list, Sequence)):  # an abstract class takes long to recognize them
        return "a sequence of tokens"
    if len(answer) > limit:
        return f"at most {limit} tokens"
    for token in answer:
        if type(token) is not int:
            return "a sequence of ints"
        if not 0 <= token < vocab_size:
            return f"a sequence of tokens below {vocab_size}"
    return None
