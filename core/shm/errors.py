"""What can go wrong with a ring."""

from engine.core.errors import ExecutorError


class RingError(ExecutorError):
    """A ring cannot be made, attached or used as asked."""


class RingSpaceError(RingError):
    """The shared memory has no room for a ring, or for a message too long for a slot."""


class RingTimeoutError(RingError):
    """The time given to a wait is over; the ring is as it was."""


class RingClosedError(RingError):
    """The ring ended: its writer closed it, its readers left, or somebody interrupted it; the message says which."""
