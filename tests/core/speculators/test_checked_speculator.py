"""CheckedSpeculator: a speculator that fails, or answers what it may not, proposes nothing and stops nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.errors import PluginError, PluginFaultError
from engine.core.speculators import CheckedSpeculator, SpeculatedSequence, Speculator, SpeculatorSpec

SPEC = SpeculatorSpec(vocab_size=100, max_len=64, max_drafts=4)
SEQUENCE = SpeculatedSequence(request_id="r", tokens=[1, 2, 3], prompt_length=2)


class Scripted(Speculator):
    """Proposes `answer`; an exception is raised instead. Notes the calls of the other methods."""

    api = "1"

    def __init__(self, answer: Any) -> None:
        super().__init__(SPEC)
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        self.calls.append(("propose", sequence.request_id, limit))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        self.calls.append(("accepted", request_id, verified, accepted))

    def finished(self, request_id: str) -> None:
        self.calls.append(("finished", request_id))


class Broken(Scripted):
    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        raise OSError("full")

    def finished(self, request_id: str) -> None:
        raise OSError("full")


class Mute(Speculator):
    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        return ()


class Bare(Mute):
    """Does not call the base's constructor."""

    def __init__(self, spec: SpeculatorSpec, options: None = None) -> None:
        pass


@pytest.mark.parametrize("answer", [(), [], (0,), [99, 0, 99], (1, 2, 3, 4)])
def test_a_valid_proposal_passes(answer: Sequence[int]) -> None:
    checked = CheckedSpeculator(Scripted(answer), SPEC)
    assert list(checked.propose(SEQUENCE, 4)) == list(answer)
    assert checked.faults == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((1, 2, 3, 4, 5), "not at most 4 tokens"),
        ([100], "not a sequence of tokens below 100"),
        ([-1], "not a sequence of tokens below 100"),
        ([1.0], "not a sequence of ints"),
        ([True], "not a sequence of ints"),
        (["a"], "not a sequence of ints"),
        (None, "not a sequence of tokens"),
        (iter([1]), "not a sequence of tokens"),
        (ValueError("sour"), "failed in propose.*ValueError: sour"),
        (SystemExit(3), "failed in propose.*SystemExit: 3"),
    ],
)
def test_a_wrong_proposal_is_dropped_counted_and_logged_once(
    answer: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    checked = CheckedSpeculator(Scripted(answer), SPEC)
    assert [len(checked.propose(SEQUENCE, 4)) for _ in range(3)] == [0, 0, 0]
    assert checked.faults == 3
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "speculator 'Scripted' passed in from Python" in record.getMessage()
    assert re.search(reason, record.getMessage())


def test_a_proposal_after_a_fault_passes() -> None:
    speculator = Scripted(KeyError("once"))
    checked = CheckedSpeculator(speculator, SPEC)
    assert checked.propose(SEQUENCE, 4) == ()
    speculator.answer = [7]
    assert checked.propose(SEQUENCE, 4) == [7]


def test_a_failing_report_is_counted_and_logged_once_per_method(caplog: pytest.LogCaptureFixture) -> None:
    checked = CheckedSpeculator(Broken([1]), SPEC)
    for _ in range(2):
        checked.accepted("r", 1, 0)
        checked.finished("r")
    assert checked.faults == 4
    assert len(caplog.records) == 2


def test_only_a_speculator_with_an_own_method_learns() -> None:
    assert CheckedSpeculator(Scripted([1]), SPEC).learns
    assert not CheckedSpeculator(Mute(SPEC), SPEC).learns


def test_a_speculator_serves_without_the_constructor_of_its_base() -> None:
    checked = CheckedSpeculator(Bare(SPEC), SPEC)
    checked.rehearse()
    assert checked.spec is SPEC


def test_a_rehearsal_calls_each_method_once() -> None:
    speculator = Scripted([1, 2])
    CheckedSpeculator(speculator, SPEC).rehearse()
    assert speculator.calls == [("propose", "rehearsal", 4), ("accepted", "rehearsal", 2, 0), ("finished", "rehearsal")]


@pytest.mark.parametrize(
    ("speculator", "error", "reason"),
    [
        (
            Scripted(ValueError("sour")),
            PluginFaultError,
            r"'Scripted' passed in from Python failed in propose\(\): ValueError: sour",
        ),
        (Scripted([100]), PluginError, r"returned \[100\] from propose\(\), not a sequence of tokens below 100"),
        (Broken([1]), PluginFaultError, r"'Broken' passed in from Python failed in accepted\(\): OSError: full"),
    ],
)
def test_a_rehearsal_raises_what_the_first_request_would_meet(
    speculator: Scripted, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        CheckedSpeculator(speculator, SPEC).rehearse()
