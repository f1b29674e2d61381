"""Where weights come from: the safetensors files of a checkpoint, or random numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.core.errors import CheckpointError
from engine.core.layers.former_prefixes import FormerPrefixes
from engine.core.quant.base import TensorSpec, stored_tensor
from engine.core.weights.checkpoint import INDEX, PICKLES, SINGLE, Checkpoint, listed, read_json
from engine.core.weights.host_memory import host_tensor
from engine.core.weights.readers import ReadTask
from engine.core.weights.tensor_file import TensorFile
from engine.core.weights.tensor_owners import MODEL, Owners, TensorOwners

if TYPE_CHECKING:
    from engine.core.config.tree import ModelConfig

ONE = (1,)
"""Shape of a TensorSpec of one number, which a checkpoint may store with any number of dimensions."""


class WeightSource(ABC):
    """Source of a model's tensors."""

    @property
    def names(self) -> Collection[str] | None:
        """Names of all tensors. None: the source has every tensor that a model asks for."""
        return None

    def rename(self, former: Mapping[str, str]) -> None:  # noqa: B027  (a default)
        """Also find tensors by a former prefix of their names. Called before `check`.

        former: prefix -> former prefix. This default is for sources that have every name.
        """

    @abstractmethod
    def check(
        self, specs: Mapping[str, TensorSpec], ignored: Sequence[str], owners: Owners = TensorOwners
    ) -> Mapping[str, int]:
        """Check, before any tensor is read, that the source has all tensors of `specs` that are not optional.

        A tensor that is not in `specs` must match one of the patterns `ignored`. Returns the bytes of each whole tensor
        of `specs`, without absent optional ones. Raises CheckpointError if the check fails. owners: called for the
        text of such an error only.
        """

    def check_tied(self, tied: Mapping[str, str]) -> None:  # noqa: B027  (a default)
        """Check that tied tensors are equal, where the source has both.

        tied: name of a tensor that is not read -> name of the one used instead. Raises CheckpointError if the check
        fails. This default is for sources that have no tensor twice.
        """

    @abstractmethod
    def allocate(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[ReadTask]]:
        """Allocate memory on the device for this rank's shard of a tensor. Called after `check`.

        Returns the tensor, in the type that is stored, and the tasks that fill it. Raises CheckpointError if the ranks
        do not divide the sharded dimension.
        """


class SafetensorsSource(WeightSource):
    """The safetensors files of a checkpoint: one file, or several with an index."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Open the files and read their headers.

        Raises CheckpointError if a file is missing or damaged, and for weights in other formats.
        """
        self._directory = checkpoint.path
        self._checkpoint = checkpoint
        self._file_of = self._locate()
        self._prefixes = FormerPrefixes({}, ())
        self._files = {name: TensorFile(checkpoint.path / name) for name in sorted(set(self._file_of.values()))}
        for tensor, name in self._file_of.items():
            if tensor not in self._files[name].tensors:
                raise CheckpointError(f"{INDEX} says that {name} holds {tensor}, but it does not; fetch both again")

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def rename(self, former: Mapping[str, str]) -> None:
        """As WeightSource.rename, for prefixes that no tensor has."""
        self._prefixes = FormerPrefixes(former, self._file_of)

    def check(
        self, specs: Mapping[str, TensorSpec], ignored: Sequence[str], owners: Owners = TensorOwners
    ) -> Mapping[str, int]:
        """As WeightSource.check, by the files' headers; shapes and types, too."""
        stored = {name: self._in_file(stored_tensor(name, spec)) for name, spec in specs.items()}
        missing = {
            name: stored[name]
            for name, spec in specs.items()
            if not spec.optional and stored[name] not in self._file_of
        }
        if missing:
            names, asked = sorted(set(missing.values())), owners()
            askers = sorted({asked.of(name) for name in missing})
            hint = asked.quant_hint(self._file_of, set(stored.values()), self._checkpoint.quantization)
            raise CheckpointError(
                f"{self._directory} lacks {len(names)} tensor(s) that {' and '.join(askers)}"
                f" {'needs' if len(askers) == 1 else 'need'}: {listed(names)};"
                f" it has {len(self._file_of)} in {listed(sorted(self._files))}{hint and '; ' + hint}"
            )
        wanted = set(stored.values())
        left_over = [
            name
            for name in self._file_of
            if name not in wanted
            and not any(
                fnmatchcase(one, pattern) for one in {name, self._prefixes.present(name)} for pattern in ignored
            )
        ]
        if left_over:
            asked = owners()
            know = f"neither {' nor '.join([MODEL, *asked.names])} knows" if asked.names else f"{MODEL} does not know"
            hint = asked.quant_hint(self._file_of, wanted, self._checkpoint.quantization)
            raise CheckpointError(
                f"{self._directory} has {len(left_over)} tensor(s) that {know}: {listed(left_over)};"
                f" {hint or 'config.json or the architecture may not be those of these weights'}"
            )
        return {
            name: self._check(name, stored[name], spec, owners)
            for name, spec in specs.items()
            if stored[name] in self._file_of
        }

    def check_tied(self, tied: Mapping[str, str]) -> None:
        """As WeightSource.check_tied, by the stored bytes."""
        for pair in tied.items():
            name, used = map(self._in_file, pair)
            if name not in self._file_of or used not in self._file_of:
                continue
            file, other = self._files[self._file_of[name]], self._files[self._file_of[used]]
            if not file.holds_equal(name, other, used):
                raise CheckpointError(
                    f"config.json has tie_word_embeddings: true, but {name} and {used} in {self._directory} differ; set"
                    f" tie_word_embeddings to false to compute with both, or remove {name} from the checkpoint"
                )

    def allocate(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[ReadTask]]:
        # On a CPU, too, tensors are copied into new memory: those in a mapped file are not aligned, and would change
        # when the file is written to.
        name = self._in_file(stored_tensor(name, spec))
        file = self._files[self._file_of[name]]
        stored = file.tensors[name]
        shape, dim, index = list(spec.shape if spec.shape == ONE else stored.shape), 0, 0
        if spec.shard_dim is not None:
            dim = spec.shard_dim
            size, start = shape[dim], 0
            if spec.stored_in is not None:
                size, start = spec.shape[dim], spec.stored_in.start
            part = shard_range(name, spec, size, rank, ranks)
            shape[dim], index = len(part) * spec.shard_parts, start + part.start
        dtype = _torch_type(stored.dtype)
        on_cpu = torch.device(device).type == "cpu"
        tensor = host_tensor(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
        return tensor, file.read_tasks(name, dim, index, tensor, spec.shard_parts)

    def _in_file(self, name: str) -> str:
        """The name of a tensor in its file. name: the same, or the one by which the model asks for the tensor."""
        return name if name in self._file_of else self._prefixes.stored(name)

    def _locate(self) -> dict[str, str]:
        """Tensor -> file. Raises CheckpointError where one file and an index of others are two sets of weights."""
        if (self._directory / INDEX).is_file():
            file_of = self._read_index()
            others = sorted(set(file_of.values()) - {SINGLE})
            if others and (self._directory / SINGLE).is_file():
                raise CheckpointError(
                    f"{self._directory} has {SINGLE}, and {INDEX} of other files ({listed(others)}), which may be"
                    " different weights; remove the one or the others"
                )
            return file_of
        if (self._directory / SINGLE).is_file():
            return dict.fromkeys(TensorFile(self._directory / SINGLE).tensors, SINGLE)
        names = sorted(entry.name for entry in self._directory.iterdir())
        pickled = [name for name in names if name.endswith(PICKLES)]
        if pickled:
            raise CheckpointError(
                f"{self._directory} has weights only as pickles ({listed(pickled)}), which can run code when read and"
                " are not loaded; convert them to safetensors (load with transformers, then save_pretrained)"
            )
        raise CheckpointError(
            f"{self._directory} has neither {SINGLE} nor {INDEX}; it has {listed(names)}"
            " (for random weights use --load-format dummy)"
        )

    def _read_index(self) -> dict[str, str]:
        file_of = read_json(self._directory / INDEX).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise CheckpointError(f"{self._directory / INDEX} has no weight_map from tensors to files")
        files = sorted(set(file_of.values()))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{self._directory / INDEX} names files elsewhere: {listed(outside)}")
        absent = [name for name in files if not (self._directory / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{self._directory} lacks {len(absent)} of the {len(files)} files in {INDEX}: {listed(absent)}"
            )
        return file_of

    def _check(self, name: str, in_file: str, spec: TensorSpec, owners: Owners) -> int:
        """The bytes of a tensor, which its file has as `in_file`. Raises CheckpointError for a wrong shape or type."""
        stored = self._files[self._file_of[in_file]].tensors[in_file]
        shape, dtype = stored.shape, stored.dtype
        expected = _stored_shape(spec)
        where = f"tensor {in_file} in {self._directory / self._file_of[in_file]}"
        fits = (math.prod(shape) == 1 and expected == ONE) or (
            len(shape) == len(expected) and all(want in (-1, size) for want, size in zip(expected, shape, strict=True))
        )
        if not fits:
            raise CheckpointError(f"{where} has shape {list(shape)}; {owners().of(name)} expects {list(expected)}")
        if dtype not in spec.dtypes:
            raise CheckpointError(f"{where} is of type {dtype}; {owners().of(name)} expects {' or '.join(spec.dtypes)}")
        return _nbytes(shape if spec.stored_in is None else spec.shape, dtype)


class DummySource(WeightSource):
    """Random weights by seed and tensor name, scaled so that activations stay finite."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def check(
        self, specs: Mapping[str, TensorSpec], ignored: Sequence[str], owners: Owners = TensorOwners
    ) -> Mapping[str, int]:
        """All tensors but optional ones exist, in the first dtype that their specs accept."""
        unknown = [name for name, spec in specs.items() if not spec.optional and -1 in spec.shape]
        if unknown:
            raise CheckpointError(
                f"no random weights for tensors whose size only a checkpoint knows: {listed(unknown)}"
            )
        return {name: _nbytes(spec.shape, spec.dtypes[0]) for name, spec in specs.items() if not spec.optional}

    def allocate(
        self, name: str, spec: TensorSpec, *, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, Iterable[ReadTask]]:
        """Computed on the device, with no tasks left. The ranks' shards are not those of one whole tensor."""
        shape = list(spec.shape)
        shard = 0
        if spec.shard_dim is not None:
            part = shard_range(name, spec, shape[spec.shard_dim], rank, ranks)
            shape[spec.shard_dim] = len(part) * spec.shard_parts
            shard = rank // spec.replicas  # replicas must be equal on all of their ranks
        dtype = _torch_type(spec.dtypes[0])
        generator = torch.Generator(device).manual_seed(_seed_of(f"{self._seed} {shard} {name}"))
        return _random_tensor(name, shape, dtype, generator, device), ()


def weight_source(checkpoint: Checkpoint, settings: ModelConfig) -> WeightSource:
    """The source of a checkpoint's weights. Raises CheckpointError if a file is missing or damaged.

    settings: load_format "dummy" takes random weights, by its seed, and reads no file.
    """
    return DummySource(settings.seed) if settings.load_format == "dummy" else SafetensorsSource(checkpoint)


def _stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of the tensor in the checkpoint that contains the tensor of a spec."""
    if spec.stored_in is None or spec.shard_dim is None:
        return spec.shape
    shape = list(spec.shape)
    shape[spec.shard_dim] = spec.stored_in.size
    return tuple(shape)


def _random_tensor(
    name: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Numbers at the scale of trained weights: a matrix preserves the scale of its inputs, a norm's are about 1."""
    if not dtype.is_floating_point:
        limit = 2 if dtype == torch.bool else 128
        return torch.randint(limit, shape, generator=generator, dtype=dtype, device=device)
    wide = dtype.itemsize > 1  # normal_ does not support 8-bit dtypes
    values = torch.empty(shape, dtype=dtype if wide else torch.float32, device=device)
    if len(shape) == 1:
        return values.normal_(1.0 if name.endswith("weight") else 0.0, 0.02, generator=generator).to(dtype)
    fan_in = shape[-1] if shape else 1
    return values.normal_(0.0, fan_in**-0.5, generator=generator).to(dtype)


def shard_range(name: str, spec: TensorSpec, size: int, rank: int, ranks: int) -> range:
    """This rank's range of indices within each part of the sharded dimension, whose size is `size`.

    name: the tensor, as an error names it. Raises CheckpointError if the ranks do not divide the dimension.
    """
    if spec.shard_size is not None:
        return range(min(rank * spec.shard_size, size), min((rank + 1) * spec.shard_size, size))
    shards = ranks // spec.replicas
    if size % (shards * spec.shard_parts):
        raise CheckpointError(
            f"{ranks} ranks cannot share tensor {name} evenly: it has {size} in the dimension to split"
        )
    count = size // (shards * spec.shard_parts)
    return range(rank // spec.replicas * count, (rank // spec.replicas + 1) * count)


def _torch_type(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * _torch_type(dtype).itemsize


def _seed_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
