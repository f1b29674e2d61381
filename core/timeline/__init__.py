"""Timelines: what every process did and when, on one clock, as one Chrome trace.

Each process writes a `Part`; `merge` makes one trace of the parts. Ranks add the trace of torch.profiler.
"""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.timeline.merge import Report as Report, start_merge as start_merge
    from engine.core.timeline.recorder import Recorder as Recorder, TraceOptions as TraceOptions
    from engine.core.timeline.spans import Spans as Spans, write_part as write_part

__getattr__, __dir__, __all__ = exports(
    __name__,
    merge=("Report", "start_merge"),
    recorder=("Recorder", "TraceOptions"),
    spans=("Spans", "write_part"),
)
