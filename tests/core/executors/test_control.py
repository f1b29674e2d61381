"""Control calls between an executor and its ranks: encoded apart from steps, bounded, errors as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.core.errors import CheckpointError, ControlError, ExecutorError
from engine.core.executors.control import (
    CALL_BYTE,
    MAX_CALL_BYTES,
    Answer,
    answer_call,
    answer_values,
    decode_call,
    encode_call,
)
from engine.core.executors.wire import encode
from engine.core.types import Step

PLAIN: dict[str, Any] = {"number": -1, "list": [1.5, None, {"a": b"\x00"}], "text": "ü"}


class Callee:
    def __init__(self, result: Any) -> None:
        self.result = result

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_call_and_its_answer_carry_plain_data() -> None:
    call = decode_call(encode_call(7, "name", PLAIN))
    assert (call.number, call.name, call.arguments) == (7, "name", PLAIN)
    answer = answer_call(Callee((1, PLAIN)), call)
    assert answer.number == 7
    assert answer_values([answer]) == [[1, PLAIN]]


@pytest.mark.parametrize("number", [0, 2**40])
def test_the_first_byte_tells_a_call_from_a_step(number: int) -> None:
    assert encode_call(number, "a" * 300, PLAIN)[0] == CALL_BYTE
    for step in (Step(id=number, decodes=(), chunks=()), Step(id=1, decodes=tuple(range(300)), chunks=())):
        assert encode(step)[0] != CALL_BYTE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": object()}, "the arguments of name are not plain data: .*object"),
        ({"a": 2**70}, "the arguments of name are not plain data"),
        ({"a": b"x" * MAX_CALL_BYTES}, f"the arguments of name take .* at most {MAX_CALL_BYTES}"),
    ],
)
def test_arguments_that_cannot_be_sent_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ControlError, match=words):
        encode_call(1, "name", arguments)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (CheckpointError("the file is gone"), "^the file is gone$"),
        (ValueError("odd"), "^name failed: ValueError: odd$"),
        (object(), "^name failed: .*object"),
        (b"x" * (MAX_CALL_BYTES + 1), "^the answer of name takes"),
    ],
)
def test_what_fails_on_a_rank_is_its_answer(result: Any, words: str) -> None:
    answer = answer_call(Callee(result), decode_call(encode_call(1, "name", {})))
    with pytest.raises(ControlError, match=words):
        answer_values([answer])


def test_a_failed_device_is_raised() -> None:
    with pytest.raises(ExecutorError, match="the device is lost"):
        answer_call(Callee(ExecutorError("the device is lost")), decode_call(encode_call(1, "name", {})))


def test_the_error_of_several_ranks_names_the_first() -> None:
    answers = [Answer(number=1, value=encode(1)), Answer(number=1, error="no"), Answer(number=1, error="no")]
    with pytest.raises(ControlError, match=r"^rank b: no \(2 of 3 ranks failed\)$"):
        answer_values(answers, ["rank a", "rank b", "rank c"])
