"""Sources of weights: which files and tensors a checkpoint must have, shards, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import CheckpointError
from engine.core.quant.base import TensorSpec
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.readers import ReaderPool
from engine.core.weights.sources import DummySource, SafetensorsSource
from tests.core.weights.test_loader import write


def read(source: Any, name: Any, spec: Any, *, rank: int = 0, ranks: int = 1) -> Any:
    tensor, tasks = source.allocate(name, spec, rank=rank, ranks=ranks, device="cpu")
    with ReaderPool("cpu", 2) as readers:
        readers.submit(tasks).wait()
    return tensor


def read_dummy(name: Any, *, seed: int = 0, rank: int = 0, ranks: int = 1, **spec: Any) -> Any:
    return read(DummySource(seed), name, TensorSpec(**spec), rank=rank, ranks=ranks)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\).*convert them to safetensors"):
        SafetensorsSource(Checkpoint.open(tmp_path))


def test_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        SafetensorsSource(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"lacks 1 of the 1 files .*gone\.safetensors"),
        ({"weight_map": {"a": "../else.safetensors"}}, "files elsewhere"),
        ({"weight_map": {"a": "here.safetensors"}}, "says that here.safetensors holds a, but it does not"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "not a JSON object"),
    ],
)
def test_broken_index_is_an_error(tmp_path: Path, index: Any, said: str) -> None:
    write(tmp_path, {"b": torch.zeros(1)}, "here.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        SafetensorsSource(Checkpoint.open(tmp_path))


def test_dummy_weights_depend_on_name_and_seed() -> None:
    def make(name: Any, seed: Any) -> Any:
        return read_dummy(name, seed=seed, shape=(8, 8), dtypes=("float32",))

    assert torch.equal(make("a.weight", 1), make("a.weight", 1))
    assert not torch.equal(make("a.weight", 1), make("b.weight", 1))
    assert not torch.equal(make("a.weight", 1), make("a.weight", 2))


def test_dummy_weights_are_equal_on_ranks_that_hold_replicas() -> None:
    def make(rank: Any, shard_dim: Any) -> Any:
        return read_dummy("a.weight", rank=rank, ranks=2, shape=(8, 8), dtypes=("float32",), shard_dim=shard_dim)

    assert torch.equal(make(0, None), make(1, None))
    assert not torch.equal(make(0, 0), make(1, 0))


def test_tensor_of_unknown_size_is_sharded_by_its_stored_size(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.arange(6.0)})
    source = SafetensorsSource(Checkpoint.open(tmp_path))
    spec = TensorSpec(shape=(-1,), dtypes=("float32",), shard_dim=0)
    assert source.check({"a": spec}, []) == {"a": 24}
    assert read(source, "a", spec, rank=1, ranks=3).tolist() == [2.0, 3.0]
    with pytest.raises(CheckpointError, match="4 ranks cannot share tensor a"):
        read(source, "a", spec, rank=0, ranks=4)


def test_dummy_weights_have_the_dtype_shape_and_scale_of_the_spec() -> None:
    matrix = read_dummy("a.weight", shape=(256, 400), dtypes=("bfloat16", "float32"), shard_dim=0, ranks=2)
    assert matrix.dtype == torch.bfloat16
    assert matrix.shape == (128, 400)
    assert float(matrix.float().std()) == pytest.approx(0.05, rel=0.05)
    norm = read_dummy("norm.weight", shape=(400,), dtypes=("float32",))
    assert float(norm.mean()) == pytest.approx(1, abs=0.01)
    bias = read_dummy("a.bias", shape=(400,), dtypes=("float32",))
    assert float(bias.abs().max()) < 0.2
    assert read_dummy("a", shape=(4,), dtypes=("float8_e4m3fn",)).dtype == torch.float8_e4m3fn
    whole = read_dummy("a", shape=(100,), dtypes=("int32",))
    assert whole.dtype == torch.int32
    assert whole.unique().numel() > 10


def test_dummy_weights_of_unknown_size_are_an_error() -> None:
    specs = {"a": TensorSpec(shape=(-1,), dtypes=("int32",)), "b": TensorSpec(shape=(2,), dtypes=("int32",))}
    with pytest.raises(CheckpointError, match="only a checkpoint knows: a"):
        DummySource().check(specs, [])
    optional = {"a": TensorSpec(shape=(-1,), dtypes=("int32",), optional=True), "b": specs["b"]}
    assert DummySource().check(optional, []) == {"b": 8}


def test_optional_tensors_may_be_absent(tmp_path: Path) -> None:
    write(tmp_path, {"b": torch.zeros(2, 3)})
    source = SafetensorsSource(Checkpoint.open(tmp_path))
    specs = {
        "a": TensorSpec(shape=(1,), dtypes=("float32",), optional=True),
        "b": TensorSpec(shape=(2, -1), dtypes=("float32",)),
    }
    assert source.check(specs, []) == {"b": 24}


def test_dummy_tensor_that_ranks_do_not_divide_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="4 ranks cannot share tensor a evenly: it has 6 in"):
        read_dummy("a", ranks=4, shape=(6,), dtypes=("float32",), shard_dim=0)


@pytest.mark.gpu
def test_dummy_weights_on_a_gpu_depend_on_name_and_seed() -> None:
    spec = TensorSpec(shape=(256, 256), dtypes=("bfloat16",))

    def make(name: Any, seed: Any) -> Any:
        return DummySource(seed).allocate(name, spec, rank=0, ranks=1, device="cuda:0")[0]

    assert torch.equal(make("a.weight", 1), make("a.weight", 1))
    assert not torch.equal(make("a.weight", 1), make("b.weight", 1))
    assert not torch.equal(make("a.weight", 1), make("a.weight", 2))
    assert float(make("a.weight", 1).float().std()) == pytest.approx(1 / 16, rel=0.05)


def test_scalar_is_read_as_one_element(tmp_path: Path) -> None:
    source = SafetensorsSource(Checkpoint.open(write(tmp_path, {"scale": torch.tensor(0.5), "many": torch.ones(2)})))
    spec = TensorSpec(shape=(1,), dtypes=("float32",))
    assert source.check({"scale": spec}, ["many"]) == {"scale": 4}
    with ReaderPool("cpu", 1) as readers:
        scale, tasks = source.allocate("scale", spec, rank=1, ranks=2, device="cpu")
        readers.submit(tasks).wait()
    assert scale.tolist() == [0.5]
    with pytest.raises(CheckpointError, match=r"many .* has shape \[2\]; the model expects \[1\]"):
        source.check({"many": spec}, ["scale"])
    with pytest.raises(CheckpointError, match=r"scale .* has shape \[\]; the model expects \[2\]"):
        source.check({"scale": TensorSpec(shape=(2,), dtypes=("float32",))}, ["many"])
