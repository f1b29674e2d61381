"""Fixtures of the tests of speculators."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.speculators import DeviceProposals

from .heads_in_engine import Received


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """The proposals that come from the device, as they come."""
    found: Received = []
    receive = DeviceProposals.receive

    def noted(self: DeviceProposals, request_id: str, length: int, tokens: Sequence[int]) -> None:
        found.append((request_id, length, tokens))
        receive(self, request_id, length, tokens)

    monkeypatch.setattr(DeviceProposals, "receive", noted)
    return found
