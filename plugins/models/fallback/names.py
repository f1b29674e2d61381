"""Maps the tensors of a library's model to those of its checkpoints, which may be named and stacked otherwise."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from engine.plugins.models.fallback.errors import RefusedError


@frozen(kw_only=True)
class Conversion:
    """Tensors of the checkpoint that the library's operations turn into tensors of the model, as stacked experts."""

    sources: Mapping[str, tuple[int, ...]]
    """Names in the checkpoint -> shapes, in the order that the operations expect."""
    targets: tuple[str, ...]
    converter: Any
    first_target: str
    patterns: tuple[str, ...]
    """Of the converter, for each source."""
    model: Any

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names in the model -> tensors. tensors: by the names in `sources`."""
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.first_target, source, pattern, tensors[source])
        made = converter.convert(self.first_target, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@frozen(kw_only=True)
class CheckpointNames:
    """Where a model's tensors are in its checkpoints, in the form that save_pretrained writes."""

    renamed: Mapping[str, str]
    """Name in the model -> name in the checkpoint."""
    conversions: tuple[Conversion, ...]


def checkpoint_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> CheckpointNames:
    """Find the names of tensors of an empty model. Raises RefusedError if the library's conversion has no inverse."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )

    transforms = [one for one in get_model_conversion_mapping(model, add_legacy=False) if type(one) is not PrefixChange]
    if not transforms:
        return CheckpointNames(renamed={name: name for name in tensors}, conversions=())
    model._weight_conversions = transforms
    try:
        stored = revert_weight_conversion(model, dict(tensors))
    except Exception as error:  # of an operation without an inverse
        raise RefusedError(f"has checkpoints whose tensors the library converts one way only: {error}") from error
    finally:
        del model._weight_conversions
    names = {id(tensor): name for name, tensor in tensors.items()}
    renamed = {names[id(tensor)]: name for name, tensor in stored.items() if id(tensor) in names}
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        if id(stored[name]) not in names:
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(tensors))
            if pattern is None:
                raise RefusedError(f"has a tensor {name} in its checkpoints that the library does not convert back")
            groups.setdefault(target, []).append((name, pattern))
    conversions = []
    for target, sources in groups.items():
        shapes = {name: tuple(stored[name].shape) for name, _ in sources}
        patterns = tuple(pattern for _, pattern in sources)
        one = Conversion(
            sources=shapes,
            targets=(),
            converter=by_pattern[patterns[0]],
            first_target=target,
            patterns=patterns,
            model=model,
        )
        made = one.convert({name: stored[name] for name in shapes})
        wrong = [name for name, tensor in made.items() if name not in tensors or tensor.shape != tensors[name].shape]
        if wrong:
            raise RefusedError(f"has tensors that the library's conversions do not restore: {', '.join(wrong[:3])}")
        conversions.append(
            Conversion(
                sources=shapes,
                targets=tuple(made),
                converter=one.converter,
                first_target=target,
                patterns=patterns,
                model=model,
            )
        )
    found = {*renamed, *(name for one in conversions for name in one.targets)}
    missing = sorted(tensors.keys() - found)
    if missing:
        raise RefusedError(f"has tensors that its checkpoints do not have: {', '.join(missing[:3])}")
    return CheckpointNames(renamed=renamed, conversions=tuple(conversions))


def ignored_patterns(model: Any) -> Sequence[str]:
    """Patterns (fnmatch) of tensors that checkpoints may have and the library does not read."""
    found = ["*.rotary_emb.inv_freq"]
    for expression in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():
        pattern = re.sub(r"\\d\+|\.\*|\.\+", "*", expression.removeprefix("^").removesuffix("$")).replace("\\.", ".")
        if re.fullmatch(r"[\w.*]+", pattern):
            start, end = "" if expression.startswith("^") else "*", "" if expression.endswith("$") else "*"
            found.append(f"{start}{pattern}{end}")
    return found
