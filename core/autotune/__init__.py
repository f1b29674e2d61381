"""Autotuning: for each matrix product and number of rows, the implementation that measures fastest on this GPU."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.autotune.cache import (
        TuningCache as TuningCache,
        default_directory as default_directory,
        describe_machine as describe_machine,
    )
    from engine.core.autotune.op import (
        AutotunedCall as AutotunedCall,
        AutotunedOp as AutotunedOp,
        Operands as Operands,
        version_of as version_of,
    )
    from engine.core.autotune.results import TuningResults as TuningResults
    from engine.core.autotune.shipped import load_shipped as load_shipped, store_shipped as store_shipped
    from engine.core.autotune.task import TuningTask as TuningTask
    from engine.core.autotune.timer import GraphTimer as GraphTimer
    from engine.core.autotune.tuner import (
        collect_tasks as collect_tasks,
        group_calls as group_calls,
        measure as measure,
        pick_fastest as pick_fastest,
        tune_tasks as tune_tasks,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    cache=(
        "TuningCache",
        "default_directory",
        "describe_machine",
    ),
    op=(
        "AutotunedCall",
        "AutotunedOp",
        "Operands",
        "version_of",
    ),
    results=("TuningResults",),
    shipped=(
        "load_shipped",
        "store_shipped",
    ),
    task=("TuningTask",),
    timer=("GraphTimer",),
    tuner=(
        "collect_tasks",
        "group_calls",
        "measure",
        "pick_fastest",
        "tune_tasks",
    ),
)
