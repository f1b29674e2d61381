"""Executors: the contract of what runs the steps, and the encoding of messages between processes."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.executors.base import (
        MOST_STEPS as MOST_STEPS,
        Executor as Executor,
        Health as Health,
        PendingResult as PendingResult,
    )
    from engine.core.executors.wire import Decoder as Decoder, encode as encode

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "Executor",
        "Health",
        "MOST_STEPS",
        "PendingResult",
    ),
    wire=(
        "Decoder",
        "encode",
    ),
)
