"""The built-in quantization methods keep their contract, with every format of checkpoints that they read."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plugins.quant.awq import Awq
from engine.plugins.quant.compressed_tensors import CompressedTensors
from engine.plugins.quant.fp8 import Fp8, Fp8Options
from engine.plugins.quant.gptq import Gptq
from engine.plugins.quant.int8 import Int8
from engine.plugins.quant.none import Unquantized
from engine.plugins.quant.w8_method import ActivationOptions
from engine.testing.quant import QuantConformance

from .packers import Weight
from .w8_packers import compressed, fp8_blocks, fp8_per_channel, fp8_per_tensor, int8_per_channel, number

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 32}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
BLOCKS = {"outputs": (512, 256, 256), "inputs": 512}
"""Sizes that two ranks can share without cutting blocks of 128, and four without their keys and values."""


class TestUnquantized(QuantConformance):
    method = Unquantized
    quantizes = False


class TestFp8WhileLoading(QuantConformance):
    method = Fp8
    error = 0.05


class TestFp8OfTensorsWhileLoading(QuantConformance):
    method = Fp8
    options = Fp8Options(granularity="tensor")
    error = 0.05


class TestFp8OfBlocksWhileLoading(QuantConformance):
    method = Fp8
    options = Fp8Options(granularity="block")
    outputs, inputs = BLOCKS.values()
    expert_size = 256
    error = 0.05


class TestInt8WhileLoading(QuantConformance):
    method = Int8
    error = 0.02


class TestInt8WeightsAloneWhileLoading(QuantConformance):
    method = Int8
    options = ActivationOptions(activations="none")
    error = 0.015


class W8OnGpu(QuantConformance):
    """Checkpoints by hand."""

    packer = staticmethod(fp8_per_channel)

    def store(self, name: Any, weight: Any) -> Any:
        return self.packer(name, weight)


class TestFp8OfTensors(W8OnGpu):
    method = Fp8
    checkpoint = FP8
    packer = staticmethod(fp8_per_tensor())


class TestFp8Static(W8OnGpu):
    method = Fp8
    checkpoint = FP8 | {"activation_scheme": "static"}
    packer = staticmethod(fp8_per_tensor(input_scale=0.01, shape=()))


class TestFp8OfBlocks(W8OnGpu):
    method = Fp8
    checkpoint = FP8 | {"weight_block_size": [128, 128]}
    packer = staticmethod(fp8_blocks("weight_scale_inv"))
    outputs, inputs = BLOCKS.values()
    expert_size = 256


class TestFp8OfChannels(W8OnGpu):
    method = Fp8
    checkpoint = compressed("float-quantized", number("float", "channel"), number("float", "token", dynamic=True))


class TestInt8(W8OnGpu):
    method = Int8
    checkpoint = compressed("int-quantized", number("int", "channel"), number("int", "token", dynamic=True))
    packer = staticmethod(int8_per_channel)
    error = 0.015


class TestInt8WeightsAlone(W8OnGpu):
    method = Int8
    checkpoint = compressed("int-quantized", number("int", "channel"), None)
    packer = staticmethod(int8_per_channel)


class Packed(QuantConformance):
    """Checkpoints of random numbers, with scales as large as the weights are to be."""

    symmetric = False
    ordered = False
    bits = 4

    def weight(self, name: Any, weight: Any) -> Any:
        made = Weight(*weight.shape, bits=self.bits, symmetric=self.symmetric, ordered=self.ordered, seed=ord(name[0]))
        made.scales = (made.scales * float(weight.std() / made.plain.std())).half()
        return made

    def store(self, name: Any, weight: Any) -> Any:
        made = self.weight(name, weight)
        return made.gptq(), made.plain


class TestGptq(Packed):
    method = Gptq
    checkpoint = GPTQ


class TestGptqSymmetric(Packed):
    method = Gptq
    checkpoint = GPTQ | {"sym": True}
    symmetric = True


class TestGptqOrdered(Packed):
    method = Gptq
    checkpoint = GPTQ | {"desc_act": True}
    ordered = True
    may_lack = ("g_idx",)


class TestGptqOfEightBits(Packed):
    method = Gptq
    checkpoint = GPTQ | {"bits": 8}
    bits = 8


class TestAwq(Packed):
    method = Awq
    checkpoint = AWQ

    def store(self, name: Any, weight: Any) -> Any:
        made = self.weight(name, weight)
        return made.awq(), made.plain


class TestPackQuantized(Packed):
    method = CompressedTensors
    checkpoint = compressed("pack-quantized", PACKED, None)

    def store(self, name: Any, weight: Any) -> Any:
        made = self.weight(name, weight)
        return made.compressed(symmetric=self.symmetric, ordered=self.ordered), made.plain


class TestPackQuantizedSymmetric(TestPackQuantized):
    checkpoint = compressed("pack-quantized", PACKED | {"symmetric": True}, None)
    symmetric = True


class TestPackQuantizedOrdered(TestPackQuantized):
    checkpoint = compressed("pack-quantized", PACKED | {"actorder": "group"}, None)
    ordered = True


class OnGpu:
    """Activations are quantized too where a GPU multiplies quantized values."""

    device = "cuda:0"
    dtype = "bfloat16"
    outputs = (512, 256, 256)
    inputs = 512
    ranks = (2,)


@pytest.mark.gpu
class TestUnquantizedOnGpu(OnGpu, TestUnquantized):
    pass


@pytest.mark.gpu
class TestFp8WhileLoadingOnGpu(OnGpu, TestFp8WhileLoading):
    error = 0.07


@pytest.mark.gpu
class TestFp8OfBlocksOnGpu(OnGpu, TestFp8OfBlocks):
    error = 0.05


@pytest.mark.gpu
class TestFp8OfChannelsOnGpu(OnGpu, TestFp8OfChannels):
    error = 0.05


@pytest.mark.gpu
class TestInt8OnGpu(OnGpu, TestInt8):
    error = 0.02


@pytest.mark.gpu
class TestGptqOnGpu(OnGpu, TestGptq):
    pass


@pytest.mark.gpu
class TestGptqOrderedOnGpu(OnGpu, TestGptqOrdered):
    pass


@pytest.mark.gpu
class TestAwqOnGpu(OnGpu, TestAwq):
    pass


@pytest.mark.gpu
class TestPackQuantizedOnGpu(OnGpu, TestPackQuantized):
    pass
