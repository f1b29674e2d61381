"""Weights from safetensors files (or made up) into layers, one layer at a time, so that peak memory stays low."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.core.checkpoint import Checkpoint, read_json
from engine.core.errors import CheckpointError
from engine.core.layers.factory import LayerFactory
from engine.core.quant import TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

STORED_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Types in a safetensors header -> torch."""

Progress = Callable[[int, int], None]
"""Called with bytes read so far and in all, on this rank."""


class WeightSource(ABC):
    """Where a model's tensors come from."""

    @abstractmethod
    def expect(self, specs: Mapping[str, TensorSpec], ignored: Sequence[str]) -> Mapping[str, int]:
        """Check, before anything is read, that all of `specs` is there and nothing else but what `ignored` matches.

        Returns the bytes of each tensor; optional ones that are absent are left out. Raises CheckpointError.
        """

    @abstractmethod
    def read(self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str) -> torch.Tensor:
        """A tensor that `expect` has checked: this rank's shard of it, on the device, in memory of its own."""


def load_weights(layers: LayerFactory, source: WeightSource, on_progress: Progress | None = None) -> None:
    """Fill all layers that `layers` has made. Raises CheckpointError, before anything is read if it can be known."""
    wanted = {name: spec for layer in layers.layers for name, spec in layer.tensors().items()}
    sizes = {
        name: size if wanted[name].shard_dim is None else size // layers.ranks
        for name, size in source.expect(wanted, layers.ignored).items()
    }
    done, total = 0, sum(sizes.values())
    for layer in layers.layers:
        names = [name for name in layer.tensors() if name in sizes]
        layer.fill(
            {
                name: source.read(name, wanted[name], rank=layers.rank, ranks=layers.ranks, device=layers.device)
                for name in names
            }
        )
        done += sum(sizes[name] for name in names)
        if on_progress is not None:
            on_progress(done, total)


class SafetensorsSource(WeightSource):
    """The safetensors files of a checkpoint: one, or several with an index."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Opens the files; only their headers are read. Raises CheckpointError for a file missing or damaged."""
        self._directory = checkpoint.path
        self._file_of = self._locate()
        self._files = {name: _open(checkpoint.path / name) for name in sorted(set(self._file_of.values()))}
        held = {name: frozenset(file.keys()) for name, file in self._files.items()}
        for tensor, name in self._file_of.items():
            if tensor not in held[name]:
                raise CheckpointError(f"{INDEX} says that {name} holds {tensor}, but it does not; fetch both again")

    def expect(self, specs: Mapping[str, TensorSpec], ignored: Sequence[str]) -> Mapping[str, int]:
        """Check names, shapes and types by the files' headers."""
        missing = [name for name, spec in specs.items() if not spec.optional and name not in self._file_of]
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {len(missing)} tensor(s) that the model needs: {_some(missing)};"
                f" it has {len(self._file_of)} in {_some(sorted(self._files))}"
            )
        left_over = [
            name
            for name in self._file_of
            if name not in specs and not any(fnmatchcase(name, pattern) for pattern in ignored)
        ]
        if left_over:
            raise CheckpointError(
                f"{self._directory} has {len(left_over)} tensor(s) that the model does not know: {_some(left_over)};"
                " config.json or the architecture may not be those of these weights"
            )
        return {name: self._check(name, spec) for name, spec in specs.items() if name in self._file_of}

    def read(self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str) -> torch.Tensor:
        """Reads this rank's part of the file only."""
        view = self._view(name)
        part = [slice(None)] * len(spec.shape)
        if spec.shard_dim is not None and ranks > 1:
            size = _share(name, view.get_shape()[spec.shard_dim], ranks)
            part[spec.shard_dim] = slice(rank * size, (rank + 1) * size)
        scalar = not view.get_shape()
        stored: torch.Tensor = self._file(name).get_tensor(name).reshape(spec.shape) if scalar else view[tuple(part)]
        # A copy even on the CPU: the file's own pages are not aligned, and change when somebody writes to the file.
        return stored.to(device, copy=True, memory_format=torch.contiguous_format)

    def _locate(self) -> dict[str, str]:
        """Tensor -> file."""
        if (self._directory / INDEX).is_file():
            return self._read_index()
        if (self._directory / SINGLE).is_file():
            return dict.fromkeys(_open(self._directory / SINGLE).keys(), SINGLE)
        names = sorted(entry.name for entry in self._directory.iterdir())
        pickled = [name for name in names if name.endswith(PICKLES)]
        if pickled:
            raise CheckpointError(
                f"{self._directory} has weights only as pickles ({_some(pickled)}), which can run code when read and"
                " are not loaded; convert them to safetensors (load with transformers, then save_pretrained)"
            )
        raise CheckpointError(
            f"{self._directory} has neither {SINGLE} nor {INDEX}; it has {_some(names)}"
            " (for random weights use --load-format dummy)"
        )

    def _read_index(self) -> dict[str, str]:
        file_of = read_json(self._directory / INDEX).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise CheckpointError(f"{self._directory / INDEX} has no weight_map from tensors to files")
        files = sorted(set(file_of.values()))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{self._directory / INDEX} names files elsewhere: {_some(outside)}")
        absent = [name for name in files if not (self._directory / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{self._directory} lacks {len(absent)} of the {len(files)} files in {INDEX}: {_some(absent)}"
            )
        return file_of

    def _file(self, tensor: str) -> Any:
        return self._files[self._file_of[tensor]]

    def _view(self, tensor: str) -> Any:
        return self._file(tensor).get_slice(tensor)

    def _check(self, name: str, spec: TensorSpec) -> int:
        view = self._view(name)
        shape, stored = view.get_shape(), view.get_dtype()
        where = f"tensor {name} in {self._directory / self._file_of[name]}"
        fits = (not shape and spec.shape == (1,)) or (
            len(shape) == len(spec.shape)
            and all(want in (-1, size) for want, size in zip(spec.shape, shape, strict=True))
        )
        if not fits:
            raise CheckpointError(f"{where} has shape {shape}; the model expects {list(spec.shape)}")
        dtype = STORED_DTYPES.get(stored, stored)
        if dtype not in spec.dtypes:
            raise CheckpointError(f"{where} is of type {dtype}; the model expects {' or '.join(spec.dtypes)}")
        return _nbytes(shape, dtype)


class DummySource(WeightSource):
    """Made-up weights, the same for the same seed and name; scaled so that activations stay finite."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def expect(self, specs: Mapping[str, TensorSpec], ignored: Sequence[str]) -> Mapping[str, int]:
        """Everything that is not optional is there, in the first type that its spec accepts."""
        unknown = [name for name, spec in specs.items() if not spec.optional and -1 in spec.shape]
        if unknown:
            raise CheckpointError(f"tensors whose size only a checkpoint tells cannot be made up: {_some(unknown)}")
        return {name: _nbytes(spec.shape, spec.dtypes[0]) for name, spec in specs.items() if not spec.optional}

    def read(self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str) -> torch.Tensor:
        """Made on the device; the ranks' shards are not those of one whole tensor."""
        shape = list(spec.shape)
        shard = 0
        if spec.shard_dim is not None:
            shape[spec.shard_dim] = _share(name, shape[spec.shard_dim], ranks)
            shard = rank  # what all ranks hold must be equal on all
        dtype = _torch_type(spec.dtypes[0])
        generator = torch.Generator(device).manual_seed(_number_of(f"{self._seed} {shard} {name}"))
        if not dtype.is_floating_point:
            most = 2 if dtype == torch.bool else 128
            return torch.randint(most, shape, generator=generator, device=device).to(dtype)
        wide = dtype.itemsize > 1  # normal_ knows no 8-bit type
        values = torch.empty(shape, dtype=dtype if wide else torch.float32, device=device)
        if len(shape) == 1:
            return values.normal_(1.0 if name.endswith("weight") else 0.0, 0.02, generator=generator).to(dtype)
        fan_in = shape[-1] if shape else 1
        return values.normal_(0.0, fan_in**-0.5, generator=generator).to(dtype)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or cut short ({file.stat().st_size} bytes: {error}); fetch it again"
        ) from error


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise CheckpointError(
            f"{ranks} ranks cannot share tensor {name} evenly: it has {size} in the dimension to split"
        )
    return size // ranks


def _torch_type(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * _torch_type(dtype).itemsize


def _number_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "nothing"
