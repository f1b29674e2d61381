"""A server whose tokens are bytes, around the engine of another script. Arguments: configuration file, that script."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import server
from engine.core.config import EngineConfig, ModelConfig
from engine.core.errors import EngineError
from engine.core.wire import Decoder
from engine.server import main


class ByteTokenizer:
    """Has as much of engine.core.text.Tokenizer as the server and the Detokenizer use; needs no file."""

    special_tokens = frozenset({256})
    splits_characters = False

    def __init__(self, begin: str) -> None:
        self._begin = begin

    @classmethod
    def of_model(cls, model: ModelConfig) -> ByteTokenizer:
        return cls("<assistant>")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.own_bytes, ids)).decode(errors="replace")

    def decode_plainly(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.decode(ids, skip_special_tokens)

    def own_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<eos>"

    token_bytes = own_bytes

    def chat(self, messages: Sequence[Mapping[str, Any]], begin: str | None = None) -> list[int]:
        said = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(said + (begin or self._begin))


if __name__ == "__main__":
    main.Tokenizer = ByteTokenizer  # type: ignore[assignment,misc]
    config = Decoder[EngineConfig](EngineConfig).decode(Path(sys.argv[1]).read_bytes())
    try:
        sys.exit(server.run(config, command=[sys.executable, "-P", sys.argv[2]]))
    except EngineError as error:
        sys.exit(f"error: {error}")
