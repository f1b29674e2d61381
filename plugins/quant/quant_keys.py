"""What a method does with each key of a quantization_config: read the key, accept few values, or ignore the key."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.weights import FILES

log = logging.getLogger(__name__)

COMMON = frozenset({"quant_method", FILES})
"""Read for every method."""
BY_PROGRAM = frozenset(
    {
        "backend",
        "batch_size",
        "dataset",
        "exllama_config",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "producer",
        "run_compressed",
        "tokenizer",
        "use_exllama",
        "version",
    }
)
"""Which program quantized the checkpoint, with which calibration data, and which kernels other programs use for it."""


@frozen(kw_only=True)
class QuantKeys:
    """The keys of one method's quantization_config."""

    read: frozenset[str]
    """Keys that the method uses."""
    neutral: Mapping[str, tuple[Any, ...]] = {}
    """Keys that would change results -> the values that do not."""
    without_effect: frozenset[str] = BY_PROGRAM

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming the key, for a value that the method does not compute."""
        for key, accepted in self.neutral.items():
            if key in config and config[key] not in accepted:
                raise CheckpointError(
                    f"quantization_config: {key} is {config[key]!r}, which is not computed here; use a checkpoint that"
                    f" has {' or '.join(map(repr, accepted))} there, or lacks the key"
                )

    def unknown(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Keys that the method knows nothing of, sorted."""
        return sorted(set(config) - self.read - self.neutral.keys() - self.without_effect - COMMON)

    def warn_unknown(self, config: Mapping[str, Any]) -> None:
        """Log a warning that names the unknown keys."""
        names = self.unknown(config)
        if names:
            log.warning(
                "quantization_config has keys that this engine does not know and ignores: %s; compare"
                " answers with those of the program that made the checkpoint",
                ", ".join(names),
            )


def require_method(config: Mapping[str, Any], name: str, aliases: Collection[str] = ()) -> None:
    """Raise CheckpointError unless a quantization_config has quant_method `name`, or an alias of it."""
    found = config.get("quant_method")
    if found != name and found not in aliases:
        raise CheckpointError(f"the checkpoint's quant_method is {found!r}; this reads {name} only")


def quantization_file(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A file next to config.json that describes the quantization. None: the checkpoint lacks the file."""
    files = config.get(FILES) or {}
    found: Mapping[str, Any] | None = files.get(name)
    return found


def with_file(config: Mapping[str, Any], name: str, method: str) -> Mapping[str, Any]:
    """The quantization_config, or where config.json has none, the file of this name as one of quant_method `method`."""
    stored = quantization_file(config, name)
    if stored is None or set(config) - {FILES}:
        return config
    return {**stored, "quant_method": method}
