"""API keys: where they are read from, and how a client's key is compared."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from engine.core.config import ServerConfig
from engine.core.errors import ConfigError


def read_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """All keys: those of server.api_key, then those of the file, one per line. Raises ConfigError."""
    if not config.api_key_file:
        return config.api_key
    file = Path(config.api_key_file)
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the API keys in {file} cannot be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{file} (server.api_key_file) contains no key; write one per line")
    for number, key in enumerate(keys, 1):
        if not key.isprintable() or " " in key:
            raise ConfigError(f"key number {number} in {file} contains characters that no bearer token has")
    return (*config.api_key, *keys)


class ApiKeys:
    """The keys that a server accepts."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def number(self, received: bytes) -> int | None:
        """The number of a key, from 1; None for a wrong one. The time does not depend on the keys."""
        digest = _digest(received)  # of the same length whatever was received
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return matches.index(True) + 1 if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
