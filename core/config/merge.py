"""The configuration of an `Engine` made in Python: its argument `config`, overridden by its other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from reprlib import repr as shortened
from typing import Any

import attrs

from engine.core.config.default_model import demo_model
from engine.core.config.load import flatten, load_config
from engine.core.config.tree import EngineConfig
from engine.core.errors import ConfigError


def merge_arguments(
    config: EngineConfig | None,
    model: str | PathLike[str] | None,
    names: Mapping[str, str],
    settings: Mapping[str, Any],
) -> EngineConfig:
    """`config` (None: all defaults), over which the other arguments take precedence; the demo model if none is named.

    names: by extension point, the plugin chosen by name. settings: as `Engine` takes them, with "__" for the dot.
    Raises ConfigError.
    """
    if not isinstance(config, EngineConfig | None):
        raise ConfigError(f"config must be an EngineConfig, not {shortened(config)}; give settings as arguments")
    given: dict[str, object] = {f"{point}.name": name for point, name in names.items()}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    if model is not None:
        given["model.path"] = model
    given = {key: fspath(value) if isinstance(value, PathLike) else value for key, value in given.items()}
    base = {key: (value, "config") for key, value in flatten(config).items()} if config is not None else {}
    resolved = load_config(overrides={key: (value, "argument") for key, value in given.items()}, defaults=base)
    merged = resolved.config
    if config is not None:
        kept = {key: place for key, place in config.option_places.items() if resolved.origins.get(key) == "config"}
        merged = attrs.evolve(merged, option_places={**merged.option_places, **kept})
    if not merged.model.path:
        merged = attrs.evolve(merged, model=attrs.evolve(merged.model, path=demo_model()))
    if not merged.model.path:
        raise ConfigError("no model is named; give a directory, or a name on the hub, as model.path (--model)")
    return merged
