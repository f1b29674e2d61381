"""The mxfp4 method: experts of 4-bit numbers (E2M1) with a power of two per 32 inputs, as gpt-oss is published.

The experts are stacked, gate and up outputs alternately: NAME.gate_up_proj_blocks [experts, 2 * intermediate, hidden /
32, 16] uint8, the first of two inputs in the low nibble, and NAME.gate_up_proj_scales [experts, 2 * intermediate,
hidden / 32] uint8 s, which means 2^(s - 127); NAME.down_proj_blocks and _scales alike. Other layers are not quantized.
Sources: OCP Microscaling Formats (MX) specification 1.0; openai/gpt-oss (gpt_oss/torch/weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import evolve

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import WEIGHT_SHARD_DIM, ExpertTensors, PlainExperts, torch_dtype
from engine.core.quant import ExpertsKernel, ExpertsSpec, LinearKernel, LinearSpec, QuantMethod, TensorSpec
from engine.plugins.quant.quantization_config import is_listed, unquantized_modules
from engine.plugins.quant.triton_refusal import triton_refusal

if TYPE_CHECKING:
    from engine.plugins.quant.packed_experts import PackedExperts

GROUP = 32
"""Inputs that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers by the lower three bits; the fourth is the sign."""
BIAS = 127
"""Bias of a scale's exponent."""


class Mxfp4(QuantMethod[None]):
    """Reads checkpoints with MXFP4 experts."""

    api: ClassVar[str] = "2"

    def __init__(self, unquantized: tuple[str, ...]) -> None:
        self._unquantized = unquantized

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses other checkpoints, and GPUs without Triton."""
        if checkpoint is None:
            return "the checkpoint is not quantized; it needs one with quant_method mxfp4 in config.json, as gpt-oss"
        if checkpoint.get("quant_method") != "mxfp4":
            return f"the checkpoint's quant_method is {checkpoint.get('quant_method')!r}; this reads mxfp4 only"
        return triton_refusal(device)

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> Mxfp4:
        """Read the list of unquantized modules."""
        return cls(unquantized_modules(checkpoint or {}))

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """None: only experts are quantized."""
        return None

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel | None:
        """A kernel for the device. None for modules that the checkpoint leaves unquantized."""
        if is_listed(spec.name, self._unquantized):
            return None
        return Mxfp4OnCpu(spec) if spec.device == "cpu" else packed_experts(spec)


def packed_experts(spec: ExpertsSpec) -> PackedExperts:
    """The kernel for a GPU."""
    from engine.ops.experts.pack import pack_fp4
    from engine.ops.experts.weights import ExpertMatrix, WeightFormat
    from engine.plugins.quant.packed_experts import PackedExperts

    def read(linear: LinearSpec, loaded: Mapping[str, torch.Tensor]) -> ExpertMatrix:
        values = torch.cat([nibbles(loaded[f"{part.name}.blocks"]) for part in linear.parts])
        scales = torch.cat([loaded[f"{part.name}.scales"] for part in linear.parts]).T
        return pack_fp4(values, scales)

    return PackedExperts(as_stored(spec), WeightFormat(kind="fp4", group=GROUP), stored_tensors, read)


def as_stored(spec: ExpertsSpec) -> ExpertsSpec:
    """The spec with the layout of blocks, whose inputs come last, while those of unquantized weights come first."""
    return evolve(spec, stacked=True, transposed=False)


class Mxfp4OnCpu(PlainExperts):
    """Weights dequantized to the model's dtype at load, exactly in float32 and bfloat16."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__(spec)
        self._stored = ExpertTensors(as_stored(spec), stored_tensors)

    def tensors(self) -> Mapping[str, TensorSpec]:
        return self._stored.specs()

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {"gate_up": [], "down": []}
        dtype = torch_dtype(self.spec.dtype)
        for index, expert in enumerate(self.spec.rank_experts):
            mine = self._stored.of_expert(loaded, index)
            for into, linear in zip(found.values(), self.spec.linears(expert), strict=True):
                names = [part.name for part in linear.parts]
                parts = [dequantize(mine[f"{name}.blocks"], mine[f"{name}.scales"]) for name in names]
                into.append(torch.cat(parts).to(dtype))
        return {name: torch.stack(matrices) for name, matrices in found.items()}


def stored_tensors(linear: LinearSpec) -> Mapping[str, TensorSpec]:
    """NAME.blocks and NAME.scales of each part. Raises CheckpointError where ranks would cut groups."""
    shard_dim = WEIGHT_SHARD_DIM[linear.parallel]
    if linear.in_features % GROUP or linear.rank_inputs % GROUP:
        raise CheckpointError(
            f"{linear.ranks} ranks cannot share the {linear.in_features} inputs of {linear.parts[0].name}, which are"
            f" quantized in groups of {GROUP}; use fewer ranks, or --expert-parallel"
        )
    groups, found = linear.in_features // GROUP, {}
    for part in linear.parts:
        shape = (part.out_features, groups)
        found[f"{part.name}.blocks"] = TensorSpec(shape=(*shape, GROUP // 2), dtypes=("uint8",), shard_dim=shard_dim)
        found[f"{part.name}.scales"] = TensorSpec(shape=shape, dtypes=("uint8",), shard_dim=shard_dim)
    return found


def nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """[outputs, groups, 16] uint8 -> [outputs, inputs] uint8, 4 bits each."""
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks [outputs, groups, 16] and scales [outputs, groups] -> the weight, [outputs, inputs] float32."""
    numbers = torch.tensor((*VALUES, *(-value for value in VALUES)), device=blocks.device)
    powers = (scales.to(torch.int32) - BIAS).repeat_interleave(GROUP, 1)
    return torch.ldexp(numbers[nibbles(blocks).long()], powers)
