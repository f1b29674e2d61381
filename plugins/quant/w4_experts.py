"""Experts with weights in groups of inputs: on a CPU by the kernels of linear layers, on a GPU by those of experts."""

from __future__ import annotations

from engine.core.quant import ExpertsKernel, ExpertsSpec
from engine.plugins.quant.experts_by_linears import ExpertsByLinears
from engine.plugins.quant.w4a16 import Reader
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls


def w4_experts(spec: ExpertsSpec, reader: Reader, matmuls: WeightOnlyMatmuls) -> ExpertsKernel:
    """The kernel of a layer's experts. Raises CheckpointError for a scheme that no kernel of the device reads."""
    if spec.device == "cpu":
        return ExpertsByLinears(spec, lambda one: W4A16Kernel(one, reader, matmuls))
    from engine.plugins.quant.packed_experts import four_bit_experts

    return four_bit_experts(spec, reader)
