"""The layers models are built of; a model gets them from a LayerFactory, the loader fills them."""

from engine.core.layers.activation import silu_and_mul
from engine.core.layers.attention import Attention
from engine.core.layers.base import Layer
from engine.core.layers.embedding import Embedding
from engine.core.layers.factory import LayerFactory
from engine.core.layers.linear import Linear, PlainKernel
from engine.core.layers.lm_head import LMHead
from engine.core.layers.norm import HeadNorm, RMSNorm
from engine.core.layers.rotary import Angles, Rotary, RotarySpec

__all__ = [
    "Angles",
    "Attention",
    "Embedding",
    "HeadNorm",
    "LMHead",
    "Layer",
    "LayerFactory",
    "Linear",
    "PlainKernel",
    "RMSNorm",
    "Rotary",
    "RotarySpec",
    "silu_and_mul",
]
