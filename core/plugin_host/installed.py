"""Finds the installed entry points of plugins, and which of them [plugins] lets be loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from attrs import frozen

from engine.core.config.tree import PluginsConfig
from engine.core.errors import ConfigError, near_misses
from engine.core.extras import DISTRIBUTION

GROUP = "engine"
"""Entry point group of plugins."""
HOME = DISTRIBUTION
"""The distribution of this engine; its entry points are the built-in plugins."""
OBJECT = "object"
"""The distribution of a plugin passed in from Python, which has none."""


def describe_plugin(section: str, name: str, provenance: str) -> str:
    """A plugin as errors name it: attention 'mine' of my-plugin 1.0."""
    return f"{section} {name!r} {'passed in from Python' if provenance == OBJECT else f'of {provenance}'}"


@frozen(kw_only=True)
class PluginInfo:
    """One plugin: a module or object with hooks."""

    name: str
    """Its entry point; for one module of several, "entry point:module"."""
    entry_point: str
    distribution: str
    """"object" for one passed in from Python."""
    version: str

    @property
    def provenance(self) -> str:
        """Distribution and version, for people to read."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.provenance}"


@frozen(kw_only=True)
class Excluded:
    """A plugin that [plugins] keeps from being loaded. What it would offer is unknown."""

    plugin: PluginInfo
    key: Literal["allow", "deny"]
    """The setting that excludes it."""

    def __str__(self) -> str:
        if self.key == "deny":
            return f"{self.plugin} is denied: take {self.plugin.entry_point!r} out of [plugins] deny to use it"
        return f"{self.plugin} is not allowed: add {self.plugin.entry_point!r} to [plugins] allow to use it"


@frozen(kw_only=True)
class Installed:
    """The entry points of all plugins, in the order of loading, which does not depend on the file system."""

    load: tuple[EntryPoint, ...]
    excluded: tuple[Excluded, ...]
    preferred: frozenset[str]
    """Distributions whose preferences count as those of built-in plugins do, normalized."""


def find_installed(config: PluginsConfig) -> Installed:
    """Find the entry points of all plugins. Raises ConfigError for a name in [plugins] that no distribution has."""
    found = [(point, info_of(point)) for point in entry_points(group=GROUP)]
    found.sort(key=lambda one: (one[1].distribution != HOME, one[1].distribution, one[1].version, one[0]))
    names = list(dict.fromkeys(point.name for point, _ in found))
    for key, wanted in (("allow", config.allow), ("deny", config.deny)):
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"[plugins] {key} names {name!r}, but no installed distribution has such an entry point in group "
                    f"{GROUP!r}; {near_misses(name, names)}"
                )
    distributions = list(dict.fromkeys(info.distribution for _, info in found))
    for name in config.prefer:
        if normalized(name) not in map(normalized, distributions):
            raise ConfigError(
                f"[plugins] prefer names {name!r}, but no installed distribution of that name offers plugins; "
                f"{near_misses(name, distributions)}"
            )
    load: list[EntryPoint] = []
    excluded: list[Excluded] = []
    for point, info in found:
        if point.name in config.deny:
            excluded.append(Excluded(plugin=info, key="deny"))
        elif config.allow and point.name not in config.allow and info.distribution != HOME:
            excluded.append(Excluded(plugin=info, key="allow"))
        else:
            load.append(point)
    return Installed(load=tuple(load), excluded=tuple(excluded), preferred=frozenset(map(normalized, config.prefer)))


def info_of(point: EntryPoint) -> PluginInfo:
    """The plugin of an entry point."""
    distribution, version = "unknown", ""
    if point.dist is not None:
        metadata = point.dist.metadata  # which is parsed at each access
        distribution, version = metadata["Name"], metadata["Version"]
    return PluginInfo(name=point.name, entry_point=point.name, distribution=distribution, version=version)


def normalized(distribution: str) -> str:
    """The name of a distribution as package indexes compare names: My.Plugin is my-plugin."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def ways_in(excluded: Iterable[Excluded], name: str) -> str:
    """How to load what has this name, or might offer it; empty if nothing is excluded."""
    named = [str(one) for one in excluded if name in (one.plugin.entry_point, one.plugin.distribution)]
    others = [str(one.plugin) for one in excluded]
    if named:
        return "; ".join(named)
    return f"not loaded, by [plugins] allow or deny, and so not asked: {', '.join(others)}" if others else ""
