"""No quantization: every linear layer keeps its weights in the model's own type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.quant import LinearKernel, LinearSpec, QuantMethod


class Unquantized(QuantMethod):
    """Reads checkpoints whose weights are plain float32, bfloat16 or float16."""

    api: ClassVar[str] = "1"

    @classmethod
    def refuses(cls, checkpoint: Mapping[str, Any] | None, device: DeviceInfo) -> str | None:
        """A checkpoint that names a quantization method needs a plugin that reads it."""
        if checkpoint is None:
            return None
        method = checkpoint.get("quant_method", "of an unnamed method")
        return (
            f"the checkpoint's weights are quantized ({method}), and this reads only unquantized ones; choose the"
            f" plugin for {method} with --quant (engine plugins list shows those installed), or an unquantized"
            " checkpoint of the model"
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any] | None, options: Any) -> Unquantized:
        """Nothing to read from an unquantized checkpoint."""
        if checkpoint is not None:
            raise CheckpointError("a checkpoint with a quantization_config cannot be read as an unquantized one")
        return cls()

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        """None for all: core's own kernel multiplies by the weights as they are."""
        return None
