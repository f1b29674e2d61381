"""Frees what the frames of a failed start hold."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that an error, and the errors that caused it, have left.

    As long as an error is kept, its traceback keeps these variables, which may be a model and its weights.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__
