"""Weights from safetensors files (or made up) into layers, one layer at a time, so that peak memory stays low."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path

import torch

from engine.core.errors import CheckpointError
from engine.core.layers.factory import LayerFactory
from engine.core.plugin_host.faults import blame
from engine.core.quant.base import TensorSpec
from engine.core.weights.checkpoint import Checkpoint, read_json
from engine.core.weights.host_memory import host_tensor
from engine.core.weights.readers import Piece, Readers, Reading, auto_threads
from engine.core.weights.tensor_file import TensorFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

WINDOW = 512 << 20
"""Bytes of tensors (512 MiB) that are read ahead of the layer being filled; a larger layer is read by itself."""
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
    def begin(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[Piece]]:
        """A tensor that `expect` has checked: memory for this rank's shard of it on the device, and what fills it."""


def load_weights(
    layers: LayerFactory, source: WeightSource, on_progress: Progress | None = None, *, threads: int = 0
) -> None:
    """Fill all layers that `layers` has made, each as soon as its tensors are there, while the next ones are read.

    threads: how many read; 0: by the number of processors.
    Raises CheckpointError, before anything is read if it can be known.
    """
    with blame(layers.model_owner, "tensors() of a layer"):
        wanted = {name: spec for layer in layers.layers for name, spec in layer.tensors().items()}
    sizes = {
        name: _rank_bytes(name, wanted[name], size, layers.rank, layers.ranks)
        for name, size in source.expect(wanted, layers.ignored).items()
    }
    done, total = 0, sum(sizes.values())
    with Readers(layers.device, threads or max(1, auto_threads() // layers.ranks)) as readers:
        ahead = _ReadAhead(layers, source, sizes, readers)
        for layer in layers.layers:
            tensors = ahead.take()
            with blame(layers.model_owner, "fill() of a layer"):
                layer.fill(tensors)
            del tensors  # or they would stay beside those of the next layer
            done += sum(sizes.get(name, 0) for name in layer.tensors())
            if on_progress is not None:
                on_progress(done, total)


class _ReadAhead:
    """The tensors of one layer after the other; those of the next ones, up to WINDOW, are being read."""

    def __init__(self, layers: LayerFactory, source: WeightSource, sizes: Mapping[str, int], readers: Readers) -> None:
        self._layers = layers
        self._source = source
        self._sizes = sizes
        self._readers = readers
        self._next = iter(layers.layers)
        self._begun: deque[tuple[dict[str, torch.Tensor], Reading, int]] = deque()

    def take(self) -> dict[str, torch.Tensor]:
        """The tensors of the next layer, once they are read; nothing else holds them."""
        self._begin()
        tensors, reading, _ = self._begun.popleft()
        reading.wait()
        self._begin()
        return tensors

    def _begin(self) -> None:
        """Begin with as many layers as the window holds, one at least."""
        while not self._begun or sum(size for _, _, size in self._begun) < WINDOW:
            layer = next(self._next, None)
            if layer is None:
                return
            specs = {name: spec for name, spec in layer.tensors().items() if name in self._sizes}
            tensors: dict[str, torch.Tensor] = {}
            pieces: list[Piece] = []
            for name, spec in specs.items():
                tensors[name], some = self._source.begin(
                    name, spec, rank=self._layers.rank, ranks=self._layers.ranks, device=self._layers.device
                )
                pieces += some
            self._begun.append((tensors, self._readers.start(pieces), sum(self._sizes[name] for name in specs)))


class SafetensorsSource(WeightSource):
    """The safetensors files of a checkpoint: one, or several with an index."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Opens the files; only their headers are read. Raises CheckpointError for a file missing or damaged."""
        self._directory = checkpoint.path
        self._file_of = self._locate()
        self._files = {name: TensorFile(checkpoint.path / name) for name in sorted(set(self._file_of.values()))}
        for tensor, name in self._file_of.items():
            if tensor not in self._files[name].tensors:
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

    def begin(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[Piece]]:
        """Reads this rank's part of the file only; into memory of its own also on a CPU, since the file's pages are
        not aligned, and change when somebody writes to the file."""
        file = self._files[self._file_of[name]]
        stored = file.tensors[name]
        shape, dim, index = list(stored.shape or spec.shape), 0, 0
        if spec.shard_dim is not None:
            dim = spec.shard_dim
            part = _part(name, spec, shape[dim], rank, ranks)
            shape[dim], index = len(part), part.start
        dtype = _torch_type(stored.dtype)
        on_cpu = torch.device(device).type == "cpu"
        tensor = host_tensor(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
        return tensor, file.pieces(name, dim, index, tensor)

    def _locate(self) -> dict[str, str]:
        """Tensor -> file."""
        if (self._directory / INDEX).is_file():
            return self._read_index()
        if (self._directory / SINGLE).is_file():
            return dict.fromkeys(TensorFile(self._directory / SINGLE).tensors, SINGLE)
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

    def _check(self, name: str, spec: TensorSpec) -> int:
        stored = self._files[self._file_of[name]].tensors[name]
        shape, dtype = stored.shape, stored.dtype
        where = f"tensor {name} in {self._directory / self._file_of[name]}"
        fits = (not shape and spec.shape == (1,)) or (
            len(shape) == len(spec.shape)
            and all(want in (-1, size) for want, size in zip(spec.shape, shape, strict=True))
        )
        if not fits:
            raise CheckpointError(f"{where} has shape {list(shape)}; the model expects {list(spec.shape)}")
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

    def begin(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[Piece]]:
        """Made on the device, at once; the ranks' shards are not those of one whole tensor."""
        shape = list(spec.shape)
        shard = 0
        if spec.shard_dim is not None:
            shape[spec.shard_dim] = len(_part(name, spec, shape[spec.shard_dim], rank, ranks))
            shard = rank // spec.replicas  # what several ranks hold must be equal on all of them
        dtype = _torch_type(spec.dtypes[0])
        generator = torch.Generator(device).manual_seed(_number_of(f"{self._seed} {shard} {name}"))
        return _made_up(name, shape, dtype, generator, device), ()


def _made_up(name: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator, device: str) -> torch.Tensor:
    """Numbers of the scale that weights have: a matrix keeps the size of what it multiplies, a norm's are about 1."""
    if not dtype.is_floating_point:
        most = 2 if dtype == torch.bool else 128
        return torch.randint(most, shape, generator=generator, dtype=dtype, device=device)
    wide = dtype.itemsize > 1  # normal_ knows no 8-bit type
    values = torch.empty(shape, dtype=dtype if wide else torch.float32, device=device)
    if len(shape) == 1:
        return values.normal_(1.0 if name.endswith("weight") else 0.0, 0.02, generator=generator).to(dtype)
    fan_in = shape[-1] if shape else 1
    return values.normal_(0.0, fan_in**-0.5, generator=generator).to(dtype)


def _part(name: str, spec: TensorSpec, size: int, rank: int, ranks: int) -> range:
    """Which of `size` rows of the dimension that ranks share this rank holds. Raises CheckpointError if they cannot."""
    if spec.shard_size is not None:
        return range(min(rank * spec.shard_size, size), min((rank + 1) * spec.shard_size, size))
    shares = ranks // spec.replicas
    if size % shares:
        raise CheckpointError(
            f"{ranks} ranks cannot share tensor {name} evenly: it has {size} in the dimension to split"
        )
    count = size // shares
    return range(rank // spec.replicas * count, (rank // spec.replicas + 1) * count)


def _rank_bytes(name: str, spec: TensorSpec, nbytes: int, rank: int, ranks: int) -> int:
    """Of a tensor of so many bytes, on one rank. Raises CheckpointError if the ranks cannot share it."""
    if spec.shard_dim is None:
        return nbytes
    size = spec.shape[spec.shard_dim]
    return nbytes // ranks if size < 1 else nbytes // size * len(_part(name, spec, size, rank, ranks))


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
