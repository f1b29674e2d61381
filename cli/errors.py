"""Errors of the command line alone."""

from __future__ import annotations

from engine.core.errors import EngineError


class ServerError(EngineError):
    """A server that was asked over HTTP cannot be reached, or failed."""
