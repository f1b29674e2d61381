"""The signature of a thinking block, which clients send back with the block.

Nothing here is secret: the model reads its earlier reasoning from the conversation that the client sends. So the
signature of a block with its text is a constant. That of a block whose text the client asked to omit carries the text,
so that the server, which stores nothing, has it again in the next turn.
"""

from __future__ import annotations

import base64

SHOWN = "engine/1"
"""Signature of a block that has its text."""
_CARRIED = "engine/1:"
"""Precedes the text, in base64, in the signature of a block without text."""


def carrying(thinking: str) -> str:
    """The signature of a block whose text is omitted."""
    return _CARRIED + base64.b64encode(thinking.encode("utf-8", "surrogatepass")).decode()


def carried(signature: str) -> str:
    """The text that a signature carries; empty for one of another server. Raises ValueError for a damaged one."""
    if not signature.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_CARRIED), validate=True).decode()
    except ValueError:  # no base64, or no text in it
        raise ValueError("the signature is damaged") from None
