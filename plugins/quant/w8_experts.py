"""Experts with 8-bit weights: on a CPU by the kernels of linear layers, on a GPU by those of experts."""

from __future__ import annotations

import torch

from engine.core.errors import ConfigError
from engine.core.quant import FLOAT8_CAPABILITY, ExpertsKernel, ExpertsSpec, LinearSpec
from engine.plugins.quant.experts_by_linears import ExpertsByLinears
from engine.plugins.quant.w8_cpu import cpu_kernel
from engine.plugins.quant.w8_kernel import W8Format, W8Kernel


def w8_experts(spec: ExpertsSpec, form: W8Format) -> ExpertsKernel:
    """The kernel of a layer's experts. Raises ConfigError for float8 weights on a GPU without float8.

    On a GPU, static activation scales are replaced by a computed scale per token, which is at least as exact.
    """

    def on_cpu(linear: LinearSpec) -> W8Kernel:
        return cpu_kernel(linear, form)

    if spec.device == "cpu":
        return ExpertsByLinears(spec, on_cpu)
    from engine.ops.common.launch import has_capability

    if form.dtype != "int8" and not has_capability(torch.device(spec.device), FLOAT8_CAPABILITY):
        raise ConfigError(
            f"the experts {spec.name} have float8 weights, which this GPU does not read (that takes compute capability"
            f" {'.'.join(map(str, FLOAT8_CAPABILITY))}); use an int8 checkpoint, or an unquantized one and --quant int8"
        )
    from engine.plugins.quant.packed_experts import eight_bit_experts

    return eight_bit_experts(spec, on_cpu)
