"""Fixtures of the tests of speculators."""

from __future__ import annotations

import pytest

from .heads_in_engine import Received, note_proposals


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """The proposals that come from the device, as they come."""
    return note_proposals(monkeypatch)
