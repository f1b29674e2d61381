"""Base of the methods with packed weights: gptq, awq, auto-round and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.quant import QuantMethod
from engine.plugins.quant.quant_keys import QuantKeys
from engine.plugins.quant.triton_refusal import triton_refusal
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls


class W4A16Method(QuantMethod[None]):
    """Base of methods that are constructed from a quantization_config and have no options."""

    api: ClassVar[str] = "2"
    reads: ClassVar[str]
    """What a checkpoint must be, as the end of the sentence "it needs one ..."."""
    keys: ClassVar[QuantKeys]
    """The keys of a quantization_config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a quantization_config of another method, or an unsupported one."""
        self._matmuls = WeightOnlyMatmuls()

    @classmethod
    def settings(cls, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """The quantization_config to construct the method from: as stored, or of another file of the checkpoint."""
        return checkpoint

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """Refuses unquantized checkpoints, those of another method, format or bit width, and GPUs without Triton."""
        if checkpoint is None:
            return f"the checkpoint is not quantized; it needs one {cls.reads}"
        try:
            cls._construct(checkpoint)
        except CheckpointError as error:
            return str(error)
        return triton_refusal(device)

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: None) -> Self:
        """Raises CheckpointError for a checkpoint that `refuses` refuses. Logs a warning if it has unknown keys."""
        found = cls._construct(checkpoint or {})
        cls.keys.warn_unknown(cls.settings(checkpoint or {}))
        return found

    @classmethod
    def _construct(cls, checkpoint: Mapping[str, Any]) -> Self:
        config = cls.settings(checkpoint)
        found = cls(config)
        cls.keys.check(config)
        return found
