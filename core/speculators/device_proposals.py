"""Proposals that the device made, kept on the host until the next step verifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.speculators.base import SpeculatedSequence, SpeculatorSpec


class DeviceProposals:
    """Stands in for a CheckedSpeculator if the speculator runs on the device: hands out the last step's proposals.

    learns, faults: as in CheckedSpeculator. A fault on the device fails the step.
    """

    learns = False
    faults = 0

    def __init__(self, spec: SpeculatorSpec) -> None:
        self.spec = spec
        self._proposals: Mapping[str, Sequence[int]] = {}
        """By request id."""

    def receive(self, proposals: Mapping[str, Sequence[int]]) -> None:
        """Keep the proposals of the step just committed, by request id, in place of those of the step before."""
        self._proposals = proposals

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        """At most `limit` tokens; empty where the last step has proposed nothing."""
        return self._proposals.get(sequence.request_id, ())[:limit]

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        """Nothing: the device does not learn from it."""

    def finished(self, request_id: str) -> None:
        """Nothing: the next step replaces the proposals."""
