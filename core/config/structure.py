"""Converts untyped values to typed ones, never silently; errors are sentences that name the place of the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from engine.core.errors import ConfigError, EngineError, near_misses

_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
    type(None): "nothing",
}


def structure(value: Any, kind: Any, where: str) -> tuple[Any, list[str]]:
    """Convert `value` to the type `kind`. Returns it with the problems, as sentences; with problems, do not use it."""
    try:
        return _converter().structure(value, kind), []
    except Exception as error:
        return value, _sentences(error, where)


def structure_options(options: Mapping[str, Any], cls: type | None, where: str) -> Any:
    """Convert a plugin's options to an instance of its options class `cls`; None for a plugin without such a class.

    where: the place that errors name. Raises ConfigError for an unknown key, a wrong type, or a refusal of the class
    itself (ValueError, TypeError or EngineError). Any other exception is a bug of the class and passes unchanged.
    """
    if cls is None:
        if options:
            raise ConfigError(f"{where} has no options, but {', '.join(options)} was given; leave it out")
        return None
    try:
        return _converter().structure(options, cls)
    except Exception as error:
        mistake = _mistake(error)
        if mistake is not None:
            raise mistake from None
        raise ConfigError("\n".join(_sentences(error, where))) from error


def show(value: Any) -> tuple[str, str]:
    """A value in TOML syntax, and the name of its type."""
    if isinstance(value, bool):
        return str(value).lower(), _NAMES[bool]
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"', _NAMES[str]
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(one)[0] for one in value)}]", _NAMES[list]
    return str(value), _NAMES.get(type(value), type(value).__name__)


def load_yaml(text: str, where: str) -> Mapping[str, Any]:
    """Parse a YAML mapping. Raises ConfigError, also for a duplicate key."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, which SafeLoader silently drops."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            """Build a mapping; refuse a duplicate key."""
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{where}: expected sections, found {show(found)[1]}; write `model:` and its keys below it")
    return found


class _WrongTypeError(Exception):
    """A value has another type than its setting."""


class _NoMemberError(Exception):
    """No member of a union accepts a value."""

    def __init__(self, message: str, tried: Sequence[tuple[str, Exception]]) -> None:
        super().__init__(message)
        self.tried = tried
        """(type, for people to read; its error)."""


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, _exact)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_factory(_is_list, _list_hook)
    converter.register_structure_hook_factory(attrs.has, _table_hook)
    converter.register_structure_hook_factory(_is_union, _union_hook)
    return converter


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _WrongTypeError(f"expected {_NAMES[kind]}, found {_found(value)}")
    return value


def _number(value: Any, _: type) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _WrongTypeError(f"expected {_NAMES[float]}, found {_found(value)}")
    return float(value)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, Sequence)


def _list_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Converts a list or tuple item by item; refuses a string."""
    arguments = get_args(kind)
    fixed = get_origin(kind) is tuple and arguments[-1:] != (...,)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _WrongTypeError(f"expected {_NAMES[list]}, written [a, b], found {_found(value)}")
        if fixed and len(value) != len(arguments):
            raise _WrongTypeError(f"expected a list of {len(arguments)}, found {_found(value)}")
        items, errors = [], []
        for index, (one, inner) in enumerate(zip(value, arguments if fixed else cycle(arguments[:1]), strict=False)):
            try:
                items.append(converter.structure(one, inner))
            except Exception as error:
                error.add_note(IterableValidationNote(f"item {index}", index, inner))
                errors.append(error)
        if errors:
            raise IterableValidationError("wrong items", errors, kind)
        return items if get_origin(kind) is list else tuple(items)

    return hook


def _table_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Converts a table to an attrs class; refuses unknown keys."""
    inner = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _WrongTypeError(f"expected {_NAMES[dict]}, found {_found(value)}")
        return inner(value, kind)

    return hook


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _union_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Converts to the first member of the union that accepts the value."""

    def hook(value: Any, _: Any) -> Any:
        if value is None and type(None) in get_args(kind):
            return None
        members = [one for one in get_args(kind) if one is not type(None)]
        if len(members) == 1:
            return converter.structure(value, members[0])
        tried: list[tuple[str, Exception]] = []
        for member in members:
            try:
                return converter.structure(value, member)
            except Exception as error:
                tried.append((_name(member), error))
        raise _NoMemberError(f"expected {' or '.join(name for name, _ in tried)}, found {_found(value)}", tried)

    return hook


def _name(kind: Any) -> str:
    """A type, for people to read."""
    if _is_list(kind):
        return _NAMES[list]
    return _NAMES.get(kind, kind.__name__ if isinstance(kind, type) else str(kind))


def _found(value: Any) -> str:
    text, kind = show(value)
    return kind if value is None or isinstance(value, Mapping) else f"{text} ({kind})"


def _mistake(error: BaseException) -> BaseException | None:
    """The first error in a tree of cattrs errors that is a bug of the options class rather than a wrong value."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        return next(filter(None, map(_mistake, error.exceptions)), None)
    # cattrs adds a note to the error of a single value; an error without notes comes from the class as a whole.
    meant = ValueError, TypeError, EngineError, ForbiddenExtraKeysError, _WrongTypeError
    return None if hasattr(error, "__notes__") or isinstance(error, meant) else error


def _sentences(error: BaseException, where: str) -> list[str]:
    """The sentences of a tree of cattrs errors, each with its place."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        sentences = []
        for inner in error.exceptions:
            place = where
            for note in getattr(inner, "__notes__", ()):
                if isinstance(note, AttributeValidationNote):
                    place = f"{where}.{note.name}"
                elif isinstance(note, IterableValidationNote):
                    place = f"{where}[{note.index}]"
            sentences += _sentences(inner, place)
        return sentences
    if isinstance(error, ForbiddenExtraKeysError):
        known = [one.name for one in attrs.fields(error.cl)]
        return [
            f"{where}: there is no option {name!r}; {near_misses(name, known)}" for name in sorted(error.extra_fields)
        ]
    if isinstance(error, _NoMemberError):
        reasons = [
            f"not {name}, since {', and '.join(_sentences(one, where))}"
            for name, one in error.tried
            if not isinstance(one, _WrongTypeError)  # which says no more than the sentence itself
        ]
        return ["; ".join([f"{where}: {error}", *reasons])]
    if isinstance(error, KeyError):
        return [f"{where}: this option has no default; give it"]
    # A validator of attrs puts its message first, then the attribute and the value.
    message = error.args[0] if len(error.args) > 1 and isinstance(error.args[0], str) else str(error)
    return [f"{where}: {message or type(error).__name__}"]
