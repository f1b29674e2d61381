"""Events of the prefix cache, published for routers over ZeroMQ in the format of vLLM."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.kv_events.recorder import EventRecorder as EventRecorder
    from engine.core.kv_events.stream import EventStream as EventStream

__getattr__, __dir__, __all__ = exports(
    __name__,
    recorder=("EventRecorder",),
    stream=("EventStream",),
)
