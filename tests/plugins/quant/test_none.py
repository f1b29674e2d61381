from __future__ import annotations

import pytest

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.layers.linear import PlainKernel
from engine.plugins.quant.none import Unquantized

CPU = DeviceInfo(type="cpu")


def test_none_accepts_unquantized_checkpoints() -> None:
    assert Unquantized.refuses(None, CPU) is None
    layers = LayerFactory(dtype="float32", device="cpu", quant=Unquantized.from_checkpoint(None, None))
    assert isinstance(layers.linear([("a", 2)], 2).kernel, PlainKernel)


def test_none_refuses_quantized_checkpoints_by_the_name_of_their_method() -> None:
    refusal = Unquantized.refuses({"quant_method": "awq", "bits": 4}, CPU)
    assert refusal is not None
    assert "awq" in refusal
    assert "--quant" in refusal
    assert "unnamed" in (Unquantized.refuses({"bits": 4}, CPU) or "")
    with pytest.raises(CheckpointError, match="quantization_config"):
        Unquantized.from_checkpoint({"quant_method": "awq"}, None)
