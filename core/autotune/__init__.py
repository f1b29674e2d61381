"""Autotuning: for each matrix product and number of rows, the implementation that measures fastest on this GPU."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.autotune.op import (
        AutotunedCall as AutotunedCall,
        AutotunedOp as AutotunedOp,
        Operands as Operands,
        version_of as version_of,
    )
    from engine.core.autotune.task import TuningTask as TuningTask
    from engine.core.autotune.timer import GraphTimer as GraphTimer
    from engine.core.autotune.tuner import (
        group_calls as group_calls,
        measure as measure,
        pick_fastest as pick_fastest,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    op=(
        "AutotunedCall",
        "AutotunedOp",
        "Operands",
        "version_of",
    ),
    task=("TuningTask",),
    timer=("GraphTimer",),
    tuner=(
        "group_calls",
        "measure",
        "pick_fastest",
    ),
)
