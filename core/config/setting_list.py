"""Lists the settings of the configuration tree, and the ways in which each can be spelled."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import attrs
from attrs import frozen

from engine.core.config.structure_errors import show
from engine.core.config.tree import EngineConfig, OptionPlace, sections
from engine.core.errors import ConfigError

KeyPath = tuple[str, ...]
"""The parts of a dotted key."""

_TYPES: Mapping[type, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    tuple: "list of strings",
    dict: "table",
}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@frozen(kw_only=True)
class Setting:
    """One setting, as the command line and the documentation present it."""

    key: str
    """section.name."""
    type: type
    """bool, int, float, str, tuple (of strings) or dict (a plugin's options)."""
    annotation: Any
    """The type as written in the configuration tree."""
    default: Any
    help: str
    flag: str | None
    aliases: tuple[str, ...]
    """Other names of the key within its section."""
    choices: tuple[str, ...]
    secret: bool
    """Whether its value is never shown."""

    @property
    def path(self) -> tuple[str, str]:
        """Section and name."""
        section, _, name = self.key.partition(".")
        return section, name

    @property
    def alias_flags(self) -> tuple[str, ...]:
        """Other names of `flag`; none without a flag."""
        return tuple("--" + alias.replace("_", "-") for alias in self.aliases) if self.flag else ()

    @property
    def type_name(self) -> str:
        """The type, for people to read."""
        return _TYPES[self.type]


def describe() -> list[Setting]:
    """All settings, in the order of the configuration tree."""
    return list(_settings())


@functools.cache
def _settings() -> tuple[Setting, ...]:
    found = []
    for section in sections():
        cls: Any = type(section.default)
        annotations = get_type_hints(cls)
        for one in attrs.fields(cls):
            annotation = annotations[one.name]
            kind = getattr(annotation, "__origin__", annotation)
            found.append(
                Setting(
                    key=f"{section.name}.{one.name}",
                    type=dict if kind is Mapping else kind,
                    annotation=annotation,
                    default=getattr(section.default, one.name),
                    help=one.metadata["help"],
                    flag=one.metadata["flag"],
                    aliases=one.metadata["aliases"],
                    choices=one.metadata["choices"],
                    secret=one.metadata["secret"],
                )
            )
    return tuple(found)


@functools.cache
def spellings() -> Mapping[KeyPath, KeyPath]:
    """Every other spelling of a setting -> its section and name.

    Other spellings are an alias in the section (scheduler.max_num_seqs), and the name of its option alone (max_running,
    max_num_seqs) unless a section has that name.
    """
    found: dict[KeyPath, KeyPath] = {}
    for setting in _settings():
        section, _ = setting.path
        found |= {(section, alias): setting.path for alias in setting.aliases}
        if setting.flag and setting.type is not dict:
            flags = (setting.flag, *setting.alias_flags)
            found |= {(flag.removeprefix("--").replace("-", "_"),): setting.path for flag in flags}
    for one in sections():
        found.pop((one.name,), None)
    return found


def canonical(path: KeyPath) -> KeyPath:
    """The section and name of a setting however it is spelled; other paths unchanged."""
    return spellings().get(path, path)


def canonical_key(key: str) -> str:
    """The dotted key of a setting however it is spelled: max_num_seqs -> scheduler.max_running."""
    return join_key(canonical(split_key(key)))


def option_places(config: EngineConfig, section: str) -> Mapping[KeyPath, OptionPlace]:
    """Where the options of the plugin of a section were given, by their paths within the options."""
    paths = {split_key(key): place for key, place in config.option_places.items()}
    return {path[2:]: place for path, place in paths.items() if path[:2] == (section, "options")}


def join_key(path: Iterable[str]) -> str:
    """Join the parts of a dotted key; a part that contains a dot is quoted, as in TOML."""
    return ".".join(part if _BARE.fullmatch(part) else show(part)[0] for part in path)


def split_key(key: str) -> KeyPath:
    """Split a dotted key into its parts."""
    if '"' not in key:
        return tuple(key.split("."))
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{key} is not a dotted key: {error}") from error
    parts: list[str] = []
    while isinstance(table, dict):
        [(part, table)] = table.items()
        parts.append(part)
    return tuple(parts)
