"""Checkpoints on disk: reading their configuration, and loading their weights into layers."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.weights.checkpoint import (
        FILES as FILES,
        INDEX as INDEX,
        PICKLES as PICKLES,
        QUANTIZATION_FILES as QUANTIZATION_FILES,
        SINGLE as SINGLE,
        Checkpoint as Checkpoint,
        read_json as read_json,
        read_key as read_key,
    )
    from engine.core.weights.loader import load_weights as load_weights
    from engine.core.weights.sources import (
        DummySource as DummySource,
        SafetensorsSource as SafetensorsSource,
        WeightSource as WeightSource,
    )
    from engine.core.weights.tensor_file import StoredTensor as StoredTensor, TensorFile as TensorFile

__getattr__, __dir__, __all__ = exports(
    __name__,
    checkpoint=(
        "Checkpoint",
        "FILES",
        "INDEX",
        "PICKLES",
        "QUANTIZATION_FILES",
        "SINGLE",
        "read_json",
        "read_key",
    ),
    loader=("load_weights",),
    sources=(
        "DummySource",
        "SafetensorsSource",
        "WeightSource",
    ),
    tensor_file=(
        "StoredTensor",
        "TensorFile",
    ),
)
