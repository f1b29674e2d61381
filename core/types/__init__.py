"""Plain data passed between front end, scheduler and runner: requests, steps, results, outputs, statistics.

All are frozen classes of ints, floats, strings and tuples, so that each can be sent to another process as msgpack
(core/executors/wire.py). They are attrs classes except Output: there is one Output per token, and a msgspec.Struct is
created, encoded and decoded in a fraction of the time.
"""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.types.cache import (
        FULL as FULL,
        BlockKind as BlockKind,
        CacheInfo as CacheInfo,
    )
    from engine.core.types.engine_stats import EngineStats as EngineStats
    from engine.core.types.output import (
        FINISH_ABORT as FINISH_ABORT,
        FINISH_ERROR as FINISH_ERROR,
        FINISH_LENGTH as FINISH_LENGTH,
        FINISH_STOP as FINISH_STOP,
        FinishReason as FinishReason,
        Output as Output,
        RequestTimes as RequestTimes,
    )
    from engine.core.types.request import Request as Request
    from engine.core.types.result import (
        NO_TOKEN as NO_TOKEN,
        StepResult as StepResult,
        TokenLogprobs as TokenLogprobs,
    )
    from engine.core.types.sampling_params import (
        GREEDY_BELOW_TEMPERATURE as GREEDY_BELOW_TEMPERATURE,
        MAX_SEED as MAX_SEED,
        SamplingParams as SamplingParams,
    )
    from engine.core.types.statistics import (
        CacheStats as CacheStats,
        HistogramCounts as HistogramCounts,
        SpeculationStats as SpeculationStats,
    )
    from engine.core.types.step import (
        DraftSlice as DraftSlice,
        NewSequence as NewSequence,
        PrefillChunk as PrefillChunk,
        Step as Step,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    cache=("FULL", "BlockKind", "CacheInfo"),
    engine_stats=("EngineStats",),
    output=("FINISH_ABORT", "FINISH_ERROR", "FINISH_LENGTH", "FINISH_STOP", "FinishReason", "Output", "RequestTimes"),
    request=("Request",),
    result=("NO_TOKEN", "StepResult", "TokenLogprobs"),
    sampling_params=("GREEDY_BELOW_TEMPERATURE", "MAX_SEED", "SamplingParams"),
    statistics=("CacheStats", "HistogramCounts", "SpeculationStats"),
    step=("DraftSlice", "NewSequence", "PrefillChunk", "Step"),
)
