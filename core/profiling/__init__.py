"""What each module of a step must compute and move, and how near a step comes to the limits of its device."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.profiling.cost import (
        ModelCost as ModelCost,
        ModuleCost as ModuleCost,
        Peaks as Peaks,
        Work as Work,
    )
    from engine.core.profiling.count import (
        count_model as count_model,
        count_unloaded as count_unloaded,
        module_name as module_name,
    )
    from engine.core.profiling.layer_table import LayerTable as LayerTable, make_layer_table as make_layer_table
    from engine.core.profiling.live import StepKind as StepKind, StepMeter as StepMeter, StepWork as StepWork
    from engine.core.profiling.peaks import find_peaks as find_peaks
    from engine.core.profiling.rank_layers import (
        LayerRow as LayerRow,
        RankLayers as RankLayers,
        stop_layers as stop_layers,
    )
    from engine.core.profiling.step_shape import (
        StepShape as StepShape,
        visible_keys as visible_keys,
        visible_pairs as visible_pairs,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    cost=(
        "ModelCost",
        "ModuleCost",
        "Peaks",
        "Work",
    ),
    count=(
        "count_model",
        "count_unloaded",
        "module_name",
    ),
    layer_table=(
        "LayerTable",
        "make_layer_table",
    ),
    live=(
        "StepKind",
        "StepMeter",
        "StepWork",
    ),
    peaks=("find_peaks",),
    rank_layers=(
        "LayerRow",
        "RankLayers",
        "stop_layers",
    ),
    step_shape=(
        "StepShape",
        "visible_keys",
        "visible_pairs",
    ),
)
