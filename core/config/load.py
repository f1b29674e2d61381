"""Reads defaults, a file and the command line into one EngineConfig; every error names the place of the setting."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from engine.core.config.limits import BOUNDS, check_together
from engine.core.config.model_name import is_hub_name
from engine.core.config.setting_list import KeyPath, Setting, canonical, describe, join_key, spellings, split_key
from engine.core.config.structure import structure
from engine.core.config.structure_errors import show
from engine.core.config.tree import EngineConfig, OptionPlace, sections
from engine.core.config.yaml_file import load_yaml
from engine.core.errors import ConfigError, near_misses

DEFAULT = "default"
PATHS = (
    "model.path",
    "model.download_dir",
    "model.tokenizer",
    "model.chat_template",
    "executor.kernel_cache",
    "speculator.model",
    "server.api_key_file",
    "server.otlp_certificate",
    "server.profile_dir",
    "server.ssl_certfile",
    "server.ssl_keyfile",
    "server.uds",
)
"""Settings that name a file or directory. ~ is the user's home. A relative path in a file of settings starts from that
file's directory, any other from the working directory. Loading makes them absolute, since a worker on another node may
have another working directory."""
HUB_NAMES = ("model.path", "model.tokenizer", "speculator.model")
"""Settings among them that may name a model on the hub instead."""
SOCKETS = ("server.uds",)
"""Settings among them that stay relative to the working directory: the path of a socket has at most 107 bytes."""

_BOOLEANS = {"true": True, "on": True, "false": False, "off": False}


@frozen(kw_only=True)
class Resolved:
    """A configuration and the origin of each value."""

    config: EngineConfig
    origins: Mapping[str, str]
    """Key of `flatten(config)` -> default, the file's name, a flag, or the origin that the caller named."""


@frozen
class _Given:
    """A value that is not the default."""

    value: Any
    origin: str
    """For `Resolved.origins`."""
    where: str
    """For error messages."""
    place: OptionPlace
    """For `EngineConfig.option_places`."""


def flatten(config: EngineConfig) -> dict[str, Any]:
    """Dotted key -> value; a plugin's options have keys of their own (attention.options.foo)."""
    flat: dict[str, Any] = {}
    for setting in describe():
        flat |= {join_key(path): value for path, value in _leaves(setting, setting.path, _get(config, setting))}
    return flat


def load_config(
    file: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    defaults: Mapping[str, tuple[object, str]] = {},
) -> Resolved:
    """Build the configuration from `defaults` (dotted key -> (value, origin)), a TOML or YAML file, and `overrides`.

    overrides: dotted key -> value, or a pair (value, origin). A string for a setting of another type, and for a
    plugin's option, is read as on the command line: 64, true, off, [a, b].
    A key may be an alias (scheduler.max_num_seqs) or an option's name alone (max_running).
    Raises ConfigError, which lists all problems.
    """
    merge = _Merge()
    merge.add_defaults(defaults)
    if file is not None:
        merge.add_file(Path(file))
    merge.add_overrides(overrides)
    if merge.problems:
        raise ConfigError("\n".join(merge.problems))
    config = _build(merge.given)
    places = {join_key(path): one.where for path, one in merge.given.items()}
    _raise_together(config, places)
    origins = {join_key(path): one.origin for path, one in merge.given.items()}
    return Resolved(config=config, origins={key: origins.get(key, DEFAULT) for key in flatten(config)})


class _Merge:
    """Merges sources of settings, each over those before it."""

    def __init__(self) -> None:
        self._settings: dict[KeyPath, Setting] = {setting.path: setting for setting in describe()}
        self.given: dict[KeyPath, _Given] = {}
        self.problems: list[str] = []
        """Sentences; with problems, `given` is not complete."""

    def add_defaults(self, defaults: Mapping[str, tuple[object, str]]) -> None:
        """Merge dotted key -> (value, origin)."""
        names: dict[KeyPath, KeyPath] = {}
        for key, (value, origin) in defaults.items():
            path = split_key(key)
            self._put(path, _located(path, value), origin, _place(origin, key), names)

    def add_file(self, file: Path) -> None:
        """Merge a file's settings. Raises ConfigError if the file cannot be read."""
        names: dict[KeyPath, KeyPath] = {}
        directory = file.parent.absolute()
        place = OptionPlace(str(file), str(directory))
        for path, value in _sections(_read(file)):
            self._put(path, _located(path, value, directory), file.name, f"{file}: {_bracketed(path)}", names, place)

    def add_overrides(self, overrides: Mapping[str, object]) -> None:
        """Merge dotted key -> value, or (value, origin), with strings as on the command line."""
        names: dict[KeyPath, KeyPath] = {}
        for key, override in overrides.items():
            path = split_key(key)
            setting = self._settings.get(canonical(path)[:2])
            value, origin = override, setting.flag if setting is not None and setting.flag else "--set"
            if isinstance(override, tuple) and len(override) == 2 and isinstance(override[1], str):
                value, origin = override
            where = origin if _is_flag(setting, origin, path) else _place(origin, key)
            self._put(path, _located(path, _typed(value, setting)), origin, where, names)

    def _put(
        self,
        spelled: KeyPath,
        value: Any,
        origin: str,
        where: str,
        names: dict[KeyPath, KeyPath],
        place: OptionPlace | None = None,
    ) -> None:
        """Merge the value of one key. names: setting -> the key by which this source has given it, to be filled."""
        path = canonical(spelled)
        other = names.setdefault(path, spelled)
        if other != spelled:
            self.problems.append(f"{where}: {_plain(spelled)} and {_plain(other)} are one setting; give one of them")
            return
        setting = self._settings.get(path[:2])
        if setting is None or (len(path) > 2 and setting.type is not dict):
            self.problems.append(f"{where}: {_unknown(path, self._settings)}")
            return
        if setting.type is not dict:
            value, wrong = _check(
                setting, [value] if setting.type is tuple and isinstance(value, str) else value, where
            )
            self.problems.extend(wrong)
        elif path == setting.path and not isinstance(value, Mapping):
            self.problems.append(f"{where}: expected a table of options, found {show(value)[0]}")
        for inner, leaf in _leaves(setting, path, value):
            for former in [one for one in self.given if one[: len(inner)] == inner or inner[: len(one)] == one]:
                del self.given[former]
            self.given[inner] = _Given(leaf, origin, where, place or OptionPlace(origin, _working_directory()))


def validate(config: EngineConfig) -> None:
    """Raise ConfigError, which lists all problems, for a tree made in Python with impossible values."""
    problems: list[str] = []
    for setting in describe():
        value = _get(config, setting)
        if setting.type is not dict:
            problems += _check(setting, value, setting.key)[1]
        elif not isinstance(value, Mapping):
            problems.append(f"{setting.key}: expected a table of options, found {show(value)[0]}")
    if problems:
        raise ConfigError("\n".join(problems))
    _raise_together(config, {})


def _read(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from error
    if file.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error
    if file.suffix in (".yaml", ".yml"):
        return load_yaml(text, str(file))
    raise ConfigError(f"the configuration file {file} is neither .toml nor .yaml; rename it after its format")


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """(path, value) of each key of a file. A key without a table has a path of one part; an empty section, no key."""
    known = [section.name for section in sections()]
    for section, values in content.items():
        if isinstance(values, Mapping) and values:
            yield from (((section, str(name)), value) for name, value in values.items())
        elif section not in known or not (values is None or values == {}):
            yield (section,), values


def _located(path: KeyPath, value: Any, directory: Path | None = None) -> Any:
    """The value; if it is a path, an absolute one, with the user's home in place of ~.

    directory: of the file of settings that has the value, from which a relative path starts; None: the working
    directory.
    """
    key = ".".join(canonical(path))
    if key not in PATHS or not isinstance(value, str) or not value:
        return value
    value = os.path.expanduser(value)
    if directory is None and key in SOCKETS:
        return value
    found = Path(directory or _working_directory(), value)
    return value if key in HUB_NAMES and is_hub_name(value, found) else str(found)


def _working_directory() -> str:
    """The working directory; empty if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _typed(value: Any, setting: Setting | None) -> Any:
    """A string from the command line as the setting's type, if it can be read as that type."""
    if not isinstance(value, str) or setting is None or setting.type is str:
        return value
    if setting.type is bool:
        return _BOOLEANS.get(value.lower(), value)
    if setting.type is tuple:
        if value.startswith("["):
            return _list(value)
        parts = [part.strip() for part in value.split(",")]
        return parts if setting.secret else [part for part in parts if part]  # an empty key is refused, not left out
    if setting.type is dict:
        return _toml_value(value)
    try:
        return setting.type(value)
    except ValueError:
        return value


def _toml_value(text: str) -> Any:
    """3, true, "3", [1, 2] as TOML reads them, [a, b] as a list of strings; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return _list(text)


def _list(text: str) -> Any:
    """[a, b] as a list, its items without quotes as strings; other text unchanged."""
    if not (text.startswith("[") and text.endswith("]")) or "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_toml_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]


def _leaves(setting: Setting, path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """(path, value) of the setting; for a table of options, of each value in the table."""
    if setting.type is dict and isinstance(value, Mapping) and (value or path == setting.path):
        for name, inner in value.items():
            yield from _leaves(setting, (*path, str(name)), inner)
    else:
        yield path, value


def _build(given: Mapping[KeyPath, _Given]) -> EngineConfig:
    """The default configuration, overridden by the given values."""
    tree: dict[str, Any] = {section.name: {} for section in sections()}
    for path, one in given.items():
        place = tree
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = one.value
    defaults: Any = EngineConfig()
    filled = {name: attrs.evolve(getattr(defaults, name), **values) for name, values in tree.items()}
    places = {join_key(path): one.place for path, one in given.items() if len(path) > 2}
    return EngineConfig(**filled, option_places=places)


def _check(setting: Setting, value: Any, where: str) -> tuple[Any, list[str]]:
    """The value converted to the setting's type, and the problems with the value."""
    value, wrong = structure(value, setting.annotation, where)
    if wrong:
        if setting.secret:
            return value, [f"{where}: expected a {setting.type_name}; put quotes around each string"]
        return value, [f"{one}; give a value like {show(setting.default)[0]}, its default" for one in wrong]
    if setting.choices and value not in setting.choices:
        wrong.append(f"{where}: {value!r} is no choice; {near_misses(value, setting.choices)}")
    low, high = BOUNDS.get(setting.key, (None, None))
    if low is not None and high is not None and not low <= value <= high:
        wrong.append(f"{where}: {value} is out of range; give {low} to {high}")
    return value, wrong


def _raise_together(config: EngineConfig, places: Mapping[str, str]) -> None:
    problems: list[str] = []
    check_together(config, lambda key, text: problems.append(f"{places.get(key, key)}: {text}"))
    if problems:
        raise ConfigError("\n".join(problems))


def _unknown(path: KeyPath, settings: Iterable[KeyPath]) -> str:
    """The problem with a key that no setting has."""
    sections = list(dict.fromkeys(one[0] for one in settings))
    if path[0] not in sections:
        alone = [one for (one, *rest) in spellings() if not rest]
        close = difflib.get_close_matches(path[0], alone, n=3, cutoff=0.8) if len(path) == 1 else []
        if close:
            return f"there is no setting {path[0]!r}; did you mean {' or '.join(close)}?"
        return f"there is no section {path[0]!r}; {near_misses(path[0], sections)}"
    if len(path) == 1:
        return f"{path[0]} is a section; give its keys as a table"
    name = ".".join(path[1:])
    known = [*settings, *spellings()]
    elsewhere = dict.fromkeys(_bracketed(canonical(one)) for one in known if one[1:] == (name,))
    if elsewhere:
        return f"there is no such key here; did you mean {' or '.join(elsewhere)}?"
    return f"there is no such key; {near_misses(name, [one[1] for one in settings if one[0] == path[0]])}"


def _is_flag(setting: Setting | None, origin: str, path: KeyPath) -> bool:
    """Whether the origin is an option, whose name alone identifies the setting."""
    flags = () if setting is None else (setting.flag, *setting.alias_flags)
    return origin in flags and len(canonical(path)) == 2


def _bracketed(path: KeyPath) -> str:
    """A key as a TOML file spells it."""
    return path[0] if path in spellings() and len(path) == 1 else f"[{path[0]}] {'.'.join(path[1:])}".rstrip()


def _plain(path: KeyPath) -> str:
    """A key without its section."""
    return join_key(path[1:] or path)


def _place(origin: str, key: str) -> str:
    return f"{origin} ({key})"


def _get(config: EngineConfig, setting: Setting) -> Any:
    section, name = setting.path
    return getattr(getattr(config, section), name)
