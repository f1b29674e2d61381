"""Autotuning: which kernel multiplies how many rows, chosen by measurement."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.autotune.op import (
        AutotunedCall as AutotunedCall,
        AutotunedOp as AutotunedOp,
        Operands as Operands,
        version_of as version_of,
    )
    from engine.core.autotune.timer import GraphTimer as GraphTimer
    from engine.core.autotune.tuner import (
        TuningTask as TuningTask,
        decide as decide,
        group as group,
        measure as measure,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    op=(
        "AutotunedCall",
        "Operands",
        "AutotunedOp",
        "version_of",
    ),
    timer=("GraphTimer",),
    tuner=(
        "TuningTask",
        "decide",
        "group",
        "measure",
    ),
)
