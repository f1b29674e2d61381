"""Proposals that the device made, kept on the host until the next step verifies them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.speculators.base import SpeculatedSequence, SpeculatorSpec


class DeviceProposals:
    """Stands in for a CheckedSpeculator if the speculator runs on the device: hands out the last step's proposals.

    learns, faults: as in CheckedSpeculator. A fault on the device fails the step.
    """

    learns = False
    faults = 0

    def __init__(self, spec: SpeculatorSpec) -> None:
        self.spec = spec
        self._proposals: dict[str, tuple[int, Sequence[int]]] = {}
        """By request id: the number of tokens that the proposal follows, and the proposal."""

    def receive(self, request_id: str, length: int, tokens: Sequence[int]) -> None:
        """Keep the proposal of the step just committed. length: tokens of the request, prompt and output."""
        self._proposals[request_id] = (length, tokens)

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        """At most `limit` tokens; empty where the device has proposed nothing for these tokens."""
        length, tokens = self._proposals.get(sequence.request_id, (-1, ()))
        return tokens[:limit] if length == len(sequence.tokens) else ()

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        """Nothing: the device does not learn from it."""

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._proposals.pop(request_id, None)
