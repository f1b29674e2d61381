"""Ministral 8B."""

from typing import ClassVar

from engine.plugins.models.mistral import Mistral


class Ministral(Mistral):
    """Mistral under another name, with sliding windows in the layers that layer_types names."""

    architecture: ClassVar[str] = "MinistralForCausalLM"
    model_type: ClassVar[str] = "ministral"
