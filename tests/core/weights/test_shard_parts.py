"""Tensors of which a rank reads a slice of each part, and tensors that one rank alone reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.core.layers import Layer, LayerFactory
from engine.core.quant import TensorSpec
from engine.core.weights import Checkpoint, DummySource, SafetensorsSource, WeightSource, load_weights
from engine.testing.ranks import LoneRank

WHOLE = torch.arange(3 * 8 * 5).view(3, 8, 5).float()


class Reader(Layer):
    """Keeps what it is filled with."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs = specs
        self.loaded: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, TensorSpec]:
        return self.specs

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self.loaded = dict(loaded)

    @property
    def nbytes(self) -> int:
        return 0


@pytest.fixture
def stored(tmp_path: Path) -> SafetensorsSource:
    (tmp_path / "config.json").write_text("{}")
    save_file({"both": WHOLE, "other": torch.ones(7)}, tmp_path / "model.safetensors")
    return SafetensorsSource(Checkpoint.open(tmp_path))


def read(source: WeightSource, rank: int) -> tuple[Mapping[str, torch.Tensor], list[tuple[int, int]]]:
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(rank, 2))
    reader = Reader(
        {
            "both": TensorSpec(shape=(3, 8, 5), dtypes=("float32",), shard_dim=1, shard_parts=2),
            "other": TensorSpec(shape=(7,), dtypes=("float32",), only_rank=1),
        }
    )
    layers.layers.append(reader)
    progress: list[tuple[int, int]] = []
    load_weights(layers, source, lambda done, total: progress.append((done, total)))
    return reader.loaded, progress


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_reads_its_slice_of_each_part_and_its_own_tensors(rank: int, stored: SafetensorsSource) -> None:
    loaded, progress = read(stored, rank)
    gate, up = WHOLE.chunk(2, 1)
    assert torch.equal(loaded["both"], torch.cat((gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]), 1))
    assert ("other" in loaded) is (rank == 1)
    nbytes = WHOLE.nbytes // 2 + (28 if rank == 1 else 0)
    assert progress == [(nbytes, nbytes)]


def test_random_weights_have_the_same_shapes() -> None:
    loaded, _ = read(DummySource(), 0)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {"both": (3, 4, 5)}
