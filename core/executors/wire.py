"""Messages as bytes: msgpack of the attrs classes that travel (core/types.py), read back into their types.

Nothing but plain data crosses a process: what a peer sends can be wrong, but it can never run code.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from engine.core.errors import EngineError

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """A message (an attrs class or a msgspec.Struct of plain data) as msgpack."""
    return msgspec.msgpack.encode(message)


class Decoder(Generic[T]):
    """Reads messages of one type, or of a union of tagged msgspec.Structs."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`. Raises EngineError if it is not one of this type."""
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"a message could not be read as {self._kind} ({error}); are both processes of the same version?"
            ) from error
