"""Reads quantization_config of a checkpoint's config.json: which modules are quantized, and how.

Modules are named as in the checkpoint, without ".weight". Sources: compressed-tensors (quantization/quant_args.py,
quantization/quant_scheme.py, utils/match.py) and, for lists of unquantized modules, transformers' quantizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.quant import ExpertsSpec, LinearSpec
from engine.plugins.quant.conversions import instead_of
from engine.plugins.quant.quant_keys import BY_PROGRAM, QuantKeys

T = TypeVar("T")

REGEX = "re:"
"""Prefix of a target that is a regular expression, matched from the beginning of the name."""
CLASS = "Linear"
"""The class, as targets name it, of every module that is quantized here."""
COMPRESSED_KEYS = QuantKeys(
    read=frozenset({"config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config"}),
    neutral={"moe_sparsity_config": (None, {})},
    without_effect=BY_PROGRAM | {"global_compression_ratio", "quantization_status"},
)
"""Keys of quant_method compressed-tensors."""
_ACTORDERS = {"static": "weight", "dynamic": "group"}
"""Aliases."""


def match_rank(name: str, targets: Sequence[str]) -> int | None:
    """How specifically compressed-tensors targets match a module: 0 by name, 1 by pattern, 2 by class. None: not at
    all.

    Raises CheckpointError for a pattern that is no regular expression.
    """
    if name in targets:
        return 0
    for target in targets:
        if target.startswith(REGEX) and _pattern(target.removeprefix(REGEX)).match(name):
            return 1
    return 2 if CLASS in targets else None


def is_listed(name: str, modules: Sequence[str]) -> bool:
    """Whether a list of unquantized modules (modules_to_not_convert, ignored_layers) contains a module.

    An entry matches each module whose dotted name contains it as whole components: "lm_head", "model.layers.0",
    "mlp.gate" (which does not match gate_proj). Patterns with "re:" match too.
    """
    return any(
        _pattern(entry.removeprefix(REGEX)).match(name) is not None
        if entry.startswith(REGEX)
        else f".{entry}." in f".{name}."
        for entry in modules
    )


def unquantized_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The list of unquantized modules, under any of its names in a quantization_config."""
    keys = ("modules_to_not_convert", "ignored_layers", "ignore")
    return tuple(entry for key in keys for entry in _strings(config, key))


def flat_names(config: Mapping[str, Any], key: str) -> Sequence[str]:
    """The names in a list, or in a list of lists, of a quantization_config. Raises CheckpointError for other values."""
    found = config.get(key) or ()
    lists = found if isinstance(found, list | tuple) else [None]
    names: list[Any] = [name for one in lists for name in (one if isinstance(one, list | tuple) else [one])]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"quantization_config: {key} is {found!r}, not a list of names")
    return names


def same_for_all(spec: LinearSpec, lookup: Callable[[str], T]) -> T:
    """The value of `lookup` for all parts of a merged layer.

    Raises CheckpointError where the parts differ: they are multiplied as one matrix.
    """
    found = [lookup(part.stored_name) for part in spec.parts]
    for part, other in zip(spec.parts, found, strict=True):
        if other != found[0]:
            raise CheckpointError(
                f"quantization_config treats {spec.parts[0].name} as {_describe(found[0])} but {part.name} as"
                f" {_describe(other)}; they are multiplied as one matrix here, so both must be quantized alike or both"
                " left alone"
            )
    return found[0]


def same_for_experts(spec: ExpertsSpec, lookup: Callable[[str], T]) -> T:
    """The value of `lookup` for all projections of all experts of a layer.

    Raises CheckpointError where they differ: they are multiplied by one kernel.
    """
    names = [part.name for expert in range(spec.num_experts) for one in spec.linears(expert) for part in one.parts]
    first = lookup(names[0])
    for name in names[1:]:
        found = lookup(name)
        if found != first:
            raise CheckpointError(
                f"quantization_config treats {names[0]} as {_describe(first)} but {name} as {_describe(found)}; all"
                " experts of a layer must be quantized alike"
            )
    return first


@frozen(kw_only=True)
class QuantArgs:
    """How the values of weights or activations are quantized ("QuantizationArgs" of compressed-tensors)."""

    num_bits: int = 8
    type: str = "int"
    """int or float."""
    symmetric: bool = True
    strategy: str = "tensor"
    """What shares a scale: tensor, channel, token, group, block or tensor_group."""
    group_size: int | None = None
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, for strategy block."""
    dynamic: bool = False
    """Whether scales are computed from the values at run time, not stored."""
    actorder: str | None = None
    """weight (group indices are not needed), group (they are stored in weight_g_idx) or None."""

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> QuantArgs:
        """Read one table. Raises CheckpointError for values of a wrong type."""
        block = stored.get("block_structure")
        if isinstance(block, str):
            block = block.split("x")  # "128x128" in older files
        group = stored.get("group_size")
        actorder = stored.get("actorder") or None
        try:
            rows, columns = (int(side) for side in block) if block else (0, 0)
            strategy = stored.get("strategy") or ("tensor" if group is None else "group" if group > 0 else "channel")
            return cls(
                num_bits=int(stored.get("num_bits", 8)),
                type=str(stored.get("type", "int")),
                symmetric=bool(stored.get("symmetric", True)),
                strategy=str(strategy),
                group_size=None if group is None or int(group) < 0 else int(group),
                block=(rows, columns) if block else None,
                dynamic=bool(stored.get("dynamic", False)),
                actorder="group" if actorder is True else actorder and _ACTORDERS.get(actorder, str(actorder)),
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"quantization_config has {dict(stored)!r}, which cannot be read: {error}") from error

    def __str__(self) -> str:
        kind = "fp" if self.type == "float" else self.type
        shared = {"group": f"group of {self.group_size}", "block": f"block of {self.block}"}
        what = shared.get(self.strategy, self.strategy)
        return f"{kind}{self.num_bits} per {what}{'' if self.symmetric else ', asymmetric'}"


@frozen(kw_only=True)
class Scheme:
    """One config group of compressed-tensors: its targets, and how they are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: QuantArgs
    inputs: QuantArgs | None
    """How activations are quantized. None: they are not."""
    format: str
    """The storage format of weights, as "float-quantized"."""

    def __str__(self) -> str:
        inputs = "activations not quantized" if self.inputs is None else f"activations {self.inputs}"
        return f"{self.name} ({self.format}: weights {self.weights}, {inputs})"


@frozen(kw_only=True)
class CompressedConfig:
    """quantization_config of quant_method compressed-tensors."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedConfig:
        """Parse a table. Raises CheckpointError for one that cannot be read, or that quantizes nothing."""
        COMPRESSED_KEYS.check(config)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(f"quantization_config has no config_groups, but {groups!r}")
        sparsity = config.get("sparsity_config") or {}
        if sparsity and sparsity.get("format", "dense") != "dense":
            raise CheckpointError(
                f"the checkpoint's weights are sparse ({sparsity.get('format')} in sparsity_config), which is not"
                " supported; use a checkpoint saved without sparse compression"
            )
        if config.get("transform_config"):
            raise CheckpointError(
                "the checkpoint's activations are transformed before they are quantized (transform_config), which is"
                " not supported; use a checkpoint quantized without transforms"
            )
        outer = config.get("format")
        return cls(
            schemes=tuple(_scheme(name, group, outer) for name, group in groups.items()),
            ignore=_strings(config, "ignore"),
        )

    def scheme(self, name: str) -> Scheme | None:
        """How a module is quantized: by the scheme that matches it most specifically. None: it is not."""
        if match_rank(name, self.ignore) is not None:
            return None
        ranked = [(rank, one) for one in self.schemes if (rank := match_rank(name, one.targets)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _scheme(name: str, group: Any, outer: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"quantization_config: config group {name} says nothing of weights, but {group!r}")
    if group.get("output_activations"):
        raise CheckpointError(
            f"quantization_config: config group {name} quantizes outputs, which is not supported;"
            f" {instead_of('llm-compressor')}"
        )
    inputs = group.get("input_activations")
    return Scheme(
        name=name,
        targets=_strings(group, "targets"),
        weights=QuantArgs.parse(weights),
        inputs=None if not inputs else QuantArgs.parse(inputs),
        format=str(group.get("format") or outer),
    )


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise CheckpointError(f"quantization_config: {key} is {value!r}, not a list of names")
    return tuple(value)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"quantization_config: {text!r} is no regular expression: {error}") from error


def _describe(found: object) -> str:
    return "unquantized" if found is None else str(found)
