"""Executors: the contract of what runs the steps, and the encoding of messages between processes."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.executors.base import (
        MAX_STEPS_IN_FLIGHT as MAX_STEPS_IN_FLIGHT,
        Executor as Executor,
        Health as Health,
        PendingResult as PendingResult,
    )
    from engine.core.executors.control import (
        CALL_BYTE as CALL_BYTE,
        MAX_CALL_BYTES as MAX_CALL_BYTES,
        Answer as Answer,
        Call as Call,
        Callee as Callee,
        answer_call as answer_call,
        answer_values as answer_values,
        decode_call as decode_call,
        encode_call as encode_call,
    )
    from engine.core.executors.deployment import Deployment as Deployment, make_executor as make_executor
    from engine.core.executors.frames import (
        clear_frames as clear_frames,
        never_free as never_free,
        never_free_frames as never_free_frames,
    )
    from engine.core.executors.wire import MessageDecoder as MessageDecoder, encode as encode

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "Executor",
        "Health",
        "MAX_STEPS_IN_FLIGHT",
        "PendingResult",
    ),
    control=(
        "Answer",
        "CALL_BYTE",
        "Call",
        "Callee",
        "MAX_CALL_BYTES",
        "answer_call",
        "answer_values",
        "decode_call",
        "encode_call",
    ),
    deployment=(
        "Deployment",
        "make_executor",
    ),
    frames=(
        "clear_frames",
        "never_free",
        "never_free_frames",
    ),
    wire=(
        "MessageDecoder",
        "encode",
    ),
)
