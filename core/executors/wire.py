"""Encoding of messages between processes as msgpack: steps and results (`Step`, `StepResult` in core/types), and all
other messages, which are attrs classes and msgspec Structs of plain data.

Only plain data crosses a process boundary: a peer can send wrong data, but never code to run.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from engine.core.errors import EngineError
from engine.core.tokens import Tokens

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """Encode a message (an attrs class or a msgspec.Struct of plain data) as msgpack. Tokens become bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_pack)


class MessageDecoder(Generic[T]):
    """Decodes messages of one type, or of a union of tagged msgspec.Structs."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=_unpack)

    def decode(self, data: bytes | memoryview) -> T:
        """Decode `data`. Raises EngineError if it is not a message of this type."""
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"a message could not be read as {self._kind} ({error}); are both processes of the same version?"
            ) from error


def _pack(value: object) -> memoryview | str | int | float:
    """What to send for a value that is not exactly of a type of msgpack: bytes for Tokens, and the plain value for one
    of a derived class, such as numpy.float64. Raises NotImplementedError for all others."""
    if isinstance(value, Tokens):
        return value.pack()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise NotImplementedError(f"{type(value).__name__} is not plain data and cannot be sent")


def _unpack(kind: type, value: object) -> Any:
    """The value of this type that `_pack` has packed. Raises TypeError for anything else, of which msgspec makes a
    DecodeError."""
    if kind is Tokens and isinstance(value, bytes):
        return Tokens.unpack(value)
    raise TypeError(f"{kind.__name__} cannot be read from an object of class {type(value).__name__}")
