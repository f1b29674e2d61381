"""Formats of quantized checkpoints: the tensors of a linear layer, and the quantization_config in config.json.

plugins/quant (gptq.py, awq.py, pack_quantized.py, fp8.py) documents and reads these tensors. Packed weights are read
back by those plugins, so that text runs through the next layers as it does when the checkpoint is served.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.core.quant import LinearPart, LinearSpec, QuantMethod
from engine.plugins.quant.awq import Awq
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.packing import AWQ_ORDER, WORD
from engine.plugins.quant.rounding import BLOCK, FP8, dequantize, quantize, static_scale
from engine.plugins.quant.w4a16 import QuantizedWeight
from engine.plugins.quant.w4a16_kernel import W4A16Kernel
from engine.quantize.grid import Grid
from engine.quantize.settings import AWQ, GPTQ, NONE, STATIC, Settings

Tensors = dict[str, torch.Tensor]
"""Tensors of one linear layer, by suffix of their names."""


def pack(numbers: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Pack numbers below 2^bits into int32 words along `dim`, the first in the lowest bits; pads the last word with 0.

    order: the index of the number at each position of a word, from the low end; None: in order.
    """
    per_word = WORD // bits
    wide = numbers.movedim(dim, -1).to(torch.int64)
    missing = -wide.shape[-1] % per_word
    wide = torch.nn.functional.pad(wide, (0, missing))
    wide = wide.view(*wide.shape[:-1], -1, per_word)
    if order is not None:
        wide = wide[..., list(order)]
    shifts = torch.arange(0, WORD, bits, device=wide.device)
    words = (wide << shifts).sum(-1)
    words = torch.where(words >= 2 ** (WORD - 1), words - 2**WORD, words)  # the same bits as a signed number
    return words.to(torch.int32).movedim(-1, dim).contiguous()


class Format(ABC):
    """How linear layers are stored in a checkpoint."""

    def __init__(self, settings: Settings, dtype: torch.dtype) -> None:
        """dtype: the checkpoint's."""
        self.settings = settings
        self.dtype = dtype

    @abstractmethod
    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        """quantization_config. unquantized: names of linear layers that are not quantized. experts: names of modules
        with all experts of a layer that are not quantized."""


class EightBit(Format):
    """compressed-tensors, float-quantized and int-quantized: 8-bit values, scales in float32."""

    @property
    def codes(self) -> torch.dtype:
        """dtype of quantized values."""
        return FP8 if self.settings.method == "fp8" else torch.int8

    def encode(self, weight: torch.Tensor, peak: float | None) -> Tensors:
        """weight: [outputs, inputs]. peak: the largest |x| of its inputs, if activations are static."""
        codes, scale = quantize(weight, self.codes, self.settings.granularity)
        tensors = {"weight": codes, "weight_scale": scale}
        if peak is not None:
            tensors["input_scale"] = torch.tensor([static_scale(peak, self.codes)])
        return tensors

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The dequantized weight, float32."""
        return dequantize(tensors["weight"], tensors["weight_scale"], torch.float32)

    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        settings = self.settings
        kind = "float" if settings.method == "fp8" else "int"
        weights = _number(8, kind, settings.granularity)
        if settings.activations == STATIC:
            inputs = _number(8, kind, "tensor")
        elif settings.granularity == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
            inputs = _number(8, kind, "group", group_size=BLOCK, dynamic=True)
        else:
            inputs = _number(8, kind, "token", dynamic=True)
        return _compressed(self.settings, f"{kind}-quantized", weights, inputs, unquantized, experts)


class Plain(Format):
    """compressed-tensors with unquantized weights: describes the KV cache only."""

    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "frozen",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": _kv_cache_scheme(self.settings),
        }


class Packed(Format):
    """Weights of 4 or 8 bits, packed into words. Subclasses differ in the packing."""

    method: type[QuantMethod[Any]]
    """The quantization method that reads the format."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """dtype of scales."""
        return torch.float16

    @property
    def grid(self) -> Grid:
        """The grid of quantized values that the format can store."""
        settings = self.settings
        return Grid(
            bits=settings.bits,
            symmetric=settings.symmetric,
            scale_dtype=self.scale_dtype,
        )

    @abstractmethod
    def encode(self, weight: QuantizedWeight) -> Tensors:
        """Pack a weight."""

    def decode(self, tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> torch.Tensor:
        """The dequantized weight, [outputs, inputs] float32, as the engine's plugin reads it."""
        name = "layer"
        part = LinearPart(name=name, out_features=outputs)
        spec = LinearSpec(parts=(part,), in_features=inputs, bias=False, dtype="float32")
        kernel = self.method.from_checkpoint(self.config(), None).linear(spec)
        assert isinstance(kernel, W4A16Kernel)
        loaded = {f"{name}.{end}": tensor for end, tensor in tensors.items()}
        return kernel.reader.read(part, spec, loaded).dequantize(kernel.reader.scheme)


class GptqFormat(Packed):
    """GPTQ's format: version 1, which all programs read, and version 2 for zero points that differ.

    Version 1 stores zero points less one. Programs differ in what a stored -1 is, so GPTQModel refuses asymmetric
    checkpoints of version 1, unless GPTQModel itself wrote them (`is_quantized_by_v2` of its QuantizeConfig).
    """

    method = Gptq

    def encode(self, weight: QuantizedWeight) -> Tensors:
        bits, zeros = self.settings.bits, _zeros(weight)
        stored = zeros - 1 if self.settings.symmetric else zeros
        inputs = weight.values.shape[1]
        side_by_side = torch.arange(inputs) // (inputs if self.settings.group_size == -1 else self.settings.group_size)
        return {
            "qweight": pack(weight.values.T, bits, 0),
            "qzeros": pack(stored, bits, 1),
            "scales": weight.scales,
            "g_idx": side_by_side.to(torch.int32) if weight.group_of is None else weight.group_of,
        }

    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        """As Format; unquantized layers are patterns of `dynamic`, as GPTQModel writes them."""
        settings = self.settings
        patterns = [*(f"{re.escape(name)}$" for name in unquantized), *map(_module_pattern, experts)]
        left: dict[str, dict[str, Any]] = {f"-:^{pattern}": {} for pattern in patterns}
        return {
            "quant_method": "gptq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "desc_act": settings.act_order == "group" and settings.group_size > 0,
            "sym": settings.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if settings.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            **({"damp_percent": settings.damp} if settings.method == "gptq" else {}),
            **({"dynamic": left} if left else {}),
        }


class AwqFormat(Packed):
    """AWQ's format, version gemm."""

    method = Awq

    def encode(self, weight: QuantizedWeight) -> Tensors:
        return {
            "qweight": pack(weight.values.T, 4, 1, AWQ_ORDER),
            "qzeros": pack(_zeros(weight), 4, 1, AWQ_ORDER),
            "scales": weight.scales,
        }

    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.settings.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [*unquantized, *experts],
        }


class PackedTensors(Packed):
    """compressed-tensors, pack-quantized. Scales have the checkpoint's dtype."""

    method = CompressedTensors

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.dtype

    def encode(self, weight: QuantizedWeight) -> Tensors:
        bits = self.settings.bits
        tensors = {
            "weight_packed": pack(weight.values, bits, 1),
            "weight_scale": weight.scales.T.contiguous(),
            "weight_shape": torch.tensor(weight.values.shape, dtype=torch.int64),
        }
        if not self.settings.symmetric:
            tensors["weight_zero_point"] = pack(_zeros(weight).T, bits, 0)
        return tensors

    def config(self, unquantized: Sequence[str] = (), experts: Sequence[str] = ()) -> dict[str, Any]:
        settings = self.settings
        weights = _number(settings.bits, "int", "group" if settings.group_size > 0 else "channel")
        weights["symmetric"] = settings.symmetric
        if settings.group_size > 0:
            weights["group_size"] = settings.group_size
            if settings.act_order != "none":
                weights["actorder"] = settings.act_order
        return _compressed(self.settings, "pack-quantized", weights, None, unquantized, experts)


def make_format(settings: Settings, dtype: torch.dtype) -> EightBit | Packed | Plain:
    """The format of these settings, for a checkpoint of that dtype."""
    if settings.method == NONE:
        return Plain(settings, dtype)
    if settings.is_eight_bit:
        return EightBit(settings, dtype)
    kinds: dict[str, Callable[[Settings, torch.dtype], Packed]] = {GPTQ: GptqFormat, AWQ: AwqFormat}
    return kinds.get(settings.format, PackedTensors)(settings, dtype)


def _zeros(weight: QuantizedWeight) -> torch.Tensor:
    assert weight.zeros is not None
    return weight.zeros


def _module_pattern(name: str) -> str:
    """A regular expression of a module's name and of the names of the modules in it, to match from the beginning."""
    return rf"{re.escape(name)}(\..+)?$"


def _number(bits: int, kind: str, strategy: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def _kv_cache_scheme(settings: Settings) -> dict[str, Any] | None:
    """Scales are named k_scale and v_scale next to the attention's projections, [1] float32 each."""
    return _number(8, "float", "tensor") if settings.kv_cache else None


def _compressed(
    settings: Settings,
    stored: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    unquantized: Sequence[str],
    experts: Sequence[str],
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": stored}},
        "ignore": [*unquantized, *(f"re:{_module_pattern(name)}" for name in experts)],
        "kv_cache_scheme": _kv_cache_scheme(settings),
    }
