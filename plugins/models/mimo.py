"""MiMo-7B (arXiv:2505.07608)."""

from typing import ClassVar

from engine.core.layers import LayerFactory
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.qwen2 import WINDOW_KEYS, Qwen2


class MiMo(Qwen2):
    """The decoder of Qwen2, with layers that predict further tokens (MTP), which the model itself does not compute."""

    architecture: ClassVar[str] = "MiMoForCausalLM"
    model_type: ClassVar[str] = "mimo"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys().reading(*WINDOW_KEYS).ignoring("attention_bias", "num_nextn_predict_layers")
    )

    @classmethod
    def prepare(cls, layers: LayerFactory) -> None:
        """The MTP layers are read by a speculator."""
        layers.ignore("model.mtp_layers.*")
