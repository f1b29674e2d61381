"""The output directory of a quantized checkpoint. A run that was killed resumes where it stopped.

During a run its files are in a folder inside the directory: one of settings, and one of tensors per finished decoder
layer, written under another name first. At the end they become the shards. config.json is written last, so that an
incomplete checkpoint cannot be loaded.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.core.atomic_write import new_file
from engine.core.errors import ConfigError
from engine.core.weights import INDEX, PICKLES, SINGLE, TensorFile
from engine.quantize.report import REPORT, LayerReport

WORK = ".engine-quantize"
"""The folder within the output directory."""
SETTINGS = "settings.json"
NOT_COPIED = (".safetensors", ".index.json", ".gguf", ".h5", ".msgpack", *PICKLES)
"""Suffixes of files with weights or their index."""
Read = Callable[[], torch.Tensor]


class Output:
    """The output directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work = path / WORK
        self._lock: int | None = None

    def open(self, identity: Mapping[str, Any], *, restart: bool = False) -> int:
        """Start a run, or resume one that was killed. Returns the number of finished layers.

        identity: must be equal for a run to resume another. restart: delete the files of an earlier run. Raises
        ConfigError if the directory holds anything else, is finished, in use, or of another identity.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; give a new or empty directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._work.is_dir():
            what = "holds a finished checkpoint" if (self.path / REPORT).is_file() else "is not empty"
            raise ConfigError(f"{self.path} {what}, and nothing in it is replaced; give another directory")
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._work / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error.strerror}); give another directory") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(f"another process is writing to {self.path}; wait for it, or stop it") from error
        file = self._work / SETTINGS
        if restart:
            for old in self._work.iterdir():
                if old.name != "lock":
                    old.unlink()
        if file.is_file():
            self._check(json.loads(file.read_text(encoding="utf-8")), identity)
        else:
            _write_text(file, json.dumps(identity, indent=2))
        return sum(1 for _ in self._work.glob("layer-*.safetensors"))

    def _check(self, earlier: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        identity = json.loads(json.dumps(identity))
        if earlier == identity:
            return
        keys = [key for key in {**earlier, **identity} if earlier.get(key) != identity.get(key)]
        differences = ", ".join(f"{key} ({earlier.get(key)!r}, now {identity.get(key)!r})" for key in keys)
        self.close()
        raise ConfigError(
            f"{self.path} holds an unfinished run that differs in {differences}; give the same options to finish it,"
            " --restart to throw it away, or another directory"
        )

    def close(self) -> None:
        """Release the lock on the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _layer(self, number: int) -> Path:
        return self._work / f"layer-{number:05}.safetensors"

    def write_layer(self, tensors: Mapping[str, torch.Tensor], report: LayerReport) -> None:
        """Keep a finished decoder layer: tensors by their full names."""
        _save(self._layer(report.number), tensors, {"report": report.to_json()})

    def read_layer(self, number: int) -> tuple[dict[str, torch.Tensor], LayerReport]:
        """The tensors that `write_layer` kept."""
        with safe_open(self._layer(number), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            return tensors, LayerReport.from_json(file.metadata()["report"])

    def finish(
        self,
        others: Mapping[str, tuple[int, Read]],
        layers: int,
        config: Mapping[str, Any],
        source: Path,
        shard_bytes: int,
    ) -> int:
        """Write the checkpoint and return the bytes of its safetensors files. `done` must be called next.

        others: tensors outside the decoder layers: bytes, and a function that reads them. source: the checkpoint whose
        tokenizer and other files are copied. shard_bytes: size of a file, unless one tensor is larger.
        """
        (self.path / "config.json").unlink(missing_ok=True)
        for old in self.path.glob("*.safetensors*"):
            old.unlink()
        shards = _plan(self._tensors(others, layers), shard_bytes)
        where: dict[str, str] = {}
        total = 0
        for number, (names, size) in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            where |= dict.fromkeys(names, file)
            wanted = set(names)
            tensors = {name: read() for name, _, read in self._tensors(others, layers) if name in wanted}
            _save(self.path / file, tensors, {"format": "pt"})
            total += size
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": where}
            _write_text(self.path / INDEX, json.dumps(index, indent=2))
        for other in sorted(source.iterdir()):
            if other.is_file() and other.name != "config.json" and not other.name.endswith(NOT_COPIED):
                shutil.copyfile(other, self.path / other.name)
        _write_text(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def done(self) -> None:
        """Remove the files of the run."""
        shutil.rmtree(self._work)
        self.close()

    def _tensors(self, others: Mapping[str, tuple[int, Read]], layers: int) -> Iterator[tuple[str, int, Read]]:
        """Name, bytes and reading function of every tensor of the checkpoint."""
        yield from ((name, size, read) for name, (size, read) in others.items())
        for number in range(layers):
            with safe_open(self._layer(number), framework="pt", device="cpu") as file:
                for name, stored in TensorFile(self._layer(number)).tensors.items():
                    yield name, stored.nbytes, partial(file.get_tensor, name)


def _plan(tensors: Iterator[tuple[str, int, Read]], most: int) -> list[tuple[list[str], int]]:
    """Names and bytes of each shard."""
    shards: list[tuple[list[str], int]] = []
    for name, size, _ in tensors:
        if not shards or shards[-1][1] + size > most:
            shards.append(([], 0))
        names, so_far = shards[-1]
        shards[-1] = ([*names, name], so_far + size)
    return shards


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    with new_file(path, _part(path)) as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata)


def _write_text(path: Path, text: str) -> None:
    with new_file(path, _part(path)) as part:
        part.write_text(text, encoding="utf-8")


def _part(path: Path) -> Path:
    """Where a file is written before it is whole; the next run overwrites what a killed one has left there."""
    return path.with_name(path.name + ".part")
