"""Speculators propose the next tokens of sequences: their contract, and checks of their answers."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.speculators.base import (
        SpeculatedSequence as SpeculatedSequence,
        Speculator as Speculator,
        SpeculatorSpec as SpeculatorSpec,
    )
    from engine.core.speculators.checked_speculator import CheckedSpeculator as CheckedSpeculator
    from engine.core.speculators.device import (
        DeviceSpeculator as DeviceSpeculator,
        DrafterShape as DrafterShape,
        DrafterSpec as DrafterSpec,
        TargetRows as TargetRows,
    )
    from engine.core.speculators.device_proposals import DeviceProposals as DeviceProposals
    from engine.core.speculators.draft_lengths import DraftLengths as DraftLengths
    from engine.core.speculators.predicted_output import PredictedOutput as PredictedOutput
    from engine.core.speculators.prediction_check import check_prediction as check_prediction
    from engine.core.speculators.step_costs import StepCosts as StepCosts
    from engine.core.speculators.step_timing import StepTiming as StepTiming

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "SpeculatedSequence",
        "Speculator",
        "SpeculatorSpec",
    ),
    checked_speculator=("CheckedSpeculator",),
    device=(
        "DeviceSpeculator",
        "DrafterShape",
        "DrafterSpec",
        "TargetRows",
    ),
    device_proposals=("DeviceProposals",),
    draft_lengths=("DraftLengths",),
    predicted_output=("PredictedOutput",),
    prediction_check=("check_prediction",),
    step_costs=("StepCosts",),
    step_timing=("StepTiming",),
)
