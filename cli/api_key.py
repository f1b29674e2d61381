"""The API key with which a command asks a server."""

from __future__ import annotations

import os

from engine.cli.options import KEY_VARIABLE

KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")
"""Environment variables that give the key; the first that is set counts."""


def client_key(given: str | None) -> str:
    """The key from the option or the environment, where the server's variable may list several; empty: none."""
    if given is not None:
        return given
    found = next((value for name in KEY_VARIABLES if (value := os.environ.get(name, ""))), "")
    return found.partition(",")[0].strip()
