"""Errors of rings."""

from engine.core.errors import ExecutorError


class RingError(ExecutorError):
    """A ring cannot be created, attached or used as requested."""


class RingSpaceError(RingError):
    """The shared memory has no room for a ring, or for a message too long for a slot."""


class RingTimeoutError(RingError):
    """A wait timed out; the ring is unchanged."""


class RingClosedError(RingError):
    """The ring ended: its writer closed it, its readers left, or a process interrupted it; the message says which."""
