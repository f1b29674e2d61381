"""A front end process whose tokens are bytes. Run as a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine.core.config.tree import ModelConfig
from engine.core.errors import CheckpointError
from engine.core.parsers import Templates
from engine.server.front_end import main as front_end

BYTES = {token: bytes([token]) for token in range(256)}
TABLES = {True: BYTES | {256: b""}, False: BYTES | {256: b"<eos>"}}


class ByteTokenizer:
    """The part of engine.core.text.Tokenizer that the server and the Detokenizer use; needs no file."""

    special_tokens = frozenset({256})
    templates = Templates(chat="{{ tools }} {{ reasoning_effort }}")
    description: ClassVar[dict[str, Any]] = {
        "tokenizer_class": "ByteTokenizer",
        **dict.fromkeys(("bos_token", "pad_token", "unk_token")),
        "eos_token": "<eos>",
        "vocab_size": 257,
        "chat_template": templates.chat,
    }
    separators = None
    splits_characters = False
    drops_space = False

    def __init__(self, begin: str) -> None:
        self._begin = begin

    @classmethod
    def of_model(cls, model: ModelConfig) -> ByteTokenizer:
        if model.tokenizer == "broken":
            raise CheckpointError("the tokenizer is broken")
        return cls("<assistant>")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "break the tokenizer":
            raise RuntimeError("the tokenizer broke")
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        table = TABLES[skip_special_tokens]
        return b"".join(table[token] for token in ids).decode(errors="replace")

    def decode_plainly(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.decode(ids, skip_special_tokens)

    def own_bytes(self, token: int) -> bytes:
        return TABLES[False][token]

    token_bytes = own_bytes

    def byte_table(self, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> Mapping[int, bytes]:
        return TABLES[skip_special_tokens and not keep]

    def exceeds(self, text: str, max_tokens: int) -> bool:
        return len(text.encode()) > max_tokens

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begin: Any = None,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str = "",
        **others: Any,
    ) -> str:
        """As a chat template: takes variables of any type, and ignores those that it does not know."""
        said = "".join(f"<tool>{tool['function']['name']}" for tool in tools)
        for message in messages:
            more = {key: value for key, value in message.items() if key not in ("role", "content")}
            said += f"<{message['role']}>{message['content']}" + (json.dumps(more) if more else "")
        return said + (f"<effort>{reasoning_effort}" if reasoning_effort else "") + str(begin or self._begin)


if __name__ == "__main__":
    sys.exit(front_end.run(ByteTokenizer.of_model))  # type: ignore[arg-type]
