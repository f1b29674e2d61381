"""Encoding of messages between processes, as msgpack: of steps and results (`Step`, `StepResult` in core/types.py), and
of all other messages, which are attrs classes and msgspec Structs of plain data.

Only plain data crosses a process boundary: a peer can send wrong data, but never code to run.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from engine.core.errors import EngineError

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """Encode a message (an attrs class or a msgspec.Struct of plain data) as msgpack."""
    return msgspec.msgpack.encode(message)


class MessageDecoder(Generic[T]):
    """Decodes messages of one type, or of a union of tagged msgspec.Structs."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """Decode `data`. Raises EngineError if it is not a message of this type."""
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"a message could not be read as {self._kind} ({error}); are both processes of the same version?"
            ) from error
