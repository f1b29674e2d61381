"""Control calls: their encoding between an executor and its ranks, and how a rank answers one.

A call travels where steps travel, and so is ordered with them. Its first byte distinguishes it from a step
(`CALL_BYTE`), so that ranks decode a step as if there were no calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.core.errors import ControlError, EngineError, ExecutorError
from engine.core.executors.wire import MessageDecoder, encode

MAX_CALL_BYTES = 120 * 2**10
"""Maximum size of a call's arguments and of one rank's answer, encoded; larger data goes in several calls."""
CALL_BYTE = 0x93
"""First byte of an encoded call, a msgpack array of three; an encoded step begins with a map's byte."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A control call, as every rank receives it."""

    number: int
    """Answers repeat it."""
    name: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """One rank's answer to a call."""

    number: int
    value: bytes = b""
    """The plain data that the operation returned, as msgpack."""
    error: str = ""
    """Why the operation failed or was refused, in a sentence; empty if it did not fail."""


class Callee(Protocol):
    """The part of core.runner.Runner that answers calls."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a control operation on this rank and return plain data.

        Raises ExecutorError if the device has failed, and any other error if only the operation has.
        """


_calls: MessageDecoder[Call] = MessageDecoder(Call)


def encode_call(number: int, name: str, arguments: Mapping[str, Any]) -> bytes:
    """Encode a call. Raises ControlError for arguments that are not plain data or are too large."""
    try:
        data = encode(Call(number, name, dict(arguments)))
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        raise ControlError(f"the arguments of {name} are not plain data: {error}") from error
    if len(data) > MAX_CALL_BYTES:
        raise ControlError(f"the arguments of {name} take {len(data)} bytes, and at most {MAX_CALL_BYTES} can be sent")
    return data


def decode_call(data: bytes) -> Call:
    """Decode a call, whose first byte is CALL_BYTE."""
    return _calls.decode(data)


def answer_call(callee: Callee, call: Call) -> Answer:
    """Run a call on this rank. An error becomes the answer; only ExecutorError, of a failed device, is raised."""
    try:
        value = encode(callee.call(call.name, call.arguments))
    except ExecutorError:
        raise
    except EngineError as error:
        return Answer(number=call.number, error=str(error))
    except Exception as error:
        return Answer(number=call.number, error=f"{call.name} failed: {type(error).__name__}: {error}")
    if len(value) > MAX_CALL_BYTES:
        sentence = f"the answer of {call.name} takes {len(value)} bytes, and at most {MAX_CALL_BYTES} can be sent"
        return Answer(number=call.number, error=sentence)
    return Answer(number=call.number, value=value)


def answer_values(answers: Sequence[Answer], ranks: Sequence[object] = ()) -> list[Any]:
    """The values of all ranks' answers, in order. Raises ControlError for the first rank that failed.

    ranks: how the error names each rank; empty if there is only one, which needs no name.
    """
    failed = [number for number, answer in enumerate(answers) if answer.error]
    if failed:
        first = failed[0]
        sentence = f"{ranks[first]}: {answers[first].error}" if ranks else answers[first].error
        others = f" ({len(failed)} of {len(answers)} ranks failed)" if len(failed) > 1 else ""
        raise ControlError(sentence + others)
    return [msgspec.msgpack.decode(answer.value) for answer in answers]
