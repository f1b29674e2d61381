"""The error that a front end reports to an HTTP client; it is a part of the contract of protocols."""

from engine.core.protocols import MAX_MESSAGE, ApiError, excerpt

__all__ = ["MAX_MESSAGE", "ApiError", "excerpt"]
