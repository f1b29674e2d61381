"""Refuses predictions that could have no effect; front ends, which lack numpy, call it too."""

from __future__ import annotations

from engine.core.errors import InvalidRequestError


def check_prediction(*, speculates: bool) -> None:
    """Raise InvalidRequestError for a request whose prediction could have no effect. speculates: whether the engine has
    a speculator."""
    if not speculates:
        raise InvalidRequestError(
            "prediction takes effect only with speculative decoding, which is off here; choose a speculator "
            "(--speculator auto), or leave prediction out",
            "prediction",
        )
