"""Drops or keeps the local variables of a failed start's frames."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Iterator


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that an error, and the errors that caused it, have left.

    As long as an error is kept, its traceback keeps these variables, which may be a model and its weights.
    """
    for one in _with_causes(error):
        traceback.clear_frames(one.__traceback__)


def never_free(value: object) -> None:
    """Keep an object until the process has ended, past Python's own clean-up.

    Use for objects that hold memory pools of a failed GPU: torch aborts the process when they are freed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def never_free_frames(error: BaseException) -> None:
    """Keep the local variables that `clear_frames` would drop, as `never_free` does."""
    for one in _with_causes(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            never_free(dict(frame.f_locals))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
