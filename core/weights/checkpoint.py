"""The JSON files of a model directory in the Hugging Face layout. loader.py reads the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from engine.core.errors import CheckpointError, InvalidRequestError
from engine.core.types import SamplingParams
from engine.core.weights.generation_config import default_params

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LISTED = 5
"""Maximum number of files or tensors that an error names."""

T = TypeVar("T", int, float, bool)

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files next to config.json in which some programs describe how they have quantized a checkpoint."""
TEXT_KEYS = ("eos_token_id", "quantization_config")
"""Keys that config.json may have under text_config, the table of the language model, instead of next to it."""
FILES = "files"
"""Key of a quantization_config under which the QUANTIZATION_FILES of the checkpoint are found, by name."""

KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


@frozen(kw_only=True)
class Checkpoint:
    """A model directory and its JSON files."""

    path: Path
    config: Mapping[str, Any]
    """config.json, with the TEXT_KEYS of its text_config that it lacks itself. Its quantization_config also holds the
    checkpoint's QUANTIZATION_FILES, under "files"."""
    generation_config: Mapping[str, Any]
    """generation_config.json; empty without that file."""

    @classmethod
    def open(cls, path: str | Path, *, generation_config: str = "auto") -> Checkpoint:
        """Read the directory's JSON files. generation_config: "none" ignores generation_config.json.

        Raises CheckpointError if `path` is not a directory or has no config.json.
        """
        directory = model_directory(path)
        if not (directory / CONFIG).is_file():
            raise CheckpointError(f"{directory} has no config.json; it is not a model in the Hugging Face layout")
        generation = directory / "generation_config.json"
        wanted = generation_config != "none" and generation.is_file()
        return cls(
            path=directory,
            config=_with_quantization_files(_with_text_keys(read_json(directory / CONFIG)), directory),
            generation_config=read_json(generation) if wanted else {},
        )

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """quantization_config of config.json; None for an unquantized checkpoint."""
        stored = self.config.get("quantization_config")
        if stored is not None and not isinstance(stored, Mapping):
            raise CheckpointError(f"{self.path}/config.json: quantization_config is {stored!r}, not a table")
        return stored or None

    def default_params(self) -> SamplingParams:
        """Defaults of requests, from generation_config.json. Raises CheckpointError if a value is out of range."""
        try:
            return default_params(self.generation_config)
        except InvalidRequestError as error:
            raise CheckpointError(f"{self.path}/generation_config.json: {error}") from error

    def eos_tokens(self) -> frozenset[int]:
        """Tokens that end a text, from generation_config.json, else config.json; empty if neither names one."""
        for name, stored in (("generation_config.json", self.generation_config), ("config.json", self.config)):
            value = stored.get("eos_token_id")
            if value is None:
                continue
            tokens = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
                raise CheckpointError(
                    f"{self.path}/{name}: eos_token_id is {value!r}; it must be a token id or a list of them"
                )
            return frozenset(tokens)
        return frozenset()


def _with_text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the TEXT_KEYS of its text_config that are missing or null next to it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    return {**config, **{key: text[key] for key in TEXT_KEYS if key in text and config.get(key) is None}}


def _with_quantization_files(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """config.json with the QUANTIZATION_FILES of the directory in its quantization_config."""
    files = {name: read_json(directory / name) for name in QUANTIZATION_FILES if (directory / name).is_file()}
    stored = config.get("quantization_config") or {}
    if not files or not isinstance(stored, Mapping):
        return config
    return {**config, "quantization_config": {**stored, FILES: files}}


def model_directory(path: str | Path) -> Path:
    """`path` with ~ expanded. Raises CheckpointError if it is not a directory."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if directory.exists():
            raise CheckpointError(f"{directory} is a file; give a directory with config.json and safetensors files")
        raise CheckpointError(
            f"the model directory {directory} does not exist; give a directory, or the name of a model on the hub"
            " (ORG/NAME, as Qwen/Qwen3-0.6B)"
        )
    return directory


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON file that holds one object. Raises CheckpointError if it cannot be read or holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))  # editors on Windows write a byte order mark
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def listed(names: Iterable[str]) -> str:
    """The first LISTED names, and how many more there are; "nothing" if there is none."""
    names = list(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "nothing"


def read_key(
    config: Mapping[str, Any],
    key: str,
    kind: type[T],
    default: T | None = None,
    *,
    least: float = 0,
    where: str = "config.json",
) -> T:
    """Read a number or flag of a config.json. `default`: its value if absent or null.

    Raises CheckpointError, naming the key, if the key is missing without a default, of another type or below `least`.
    where: how errors name the file or table.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{where} lacks {key!r}, which this model needs")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise CheckpointError(f"{where}: {key!r} is {value!r}; it must be {KINDS[kind]}")
    if value < least:
        raise CheckpointError(f"{where}: {key!r} is {value!r}; it must be at least {least}")
    return value
