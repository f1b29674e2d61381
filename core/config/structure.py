"""Converts untyped values to typed ones; refuses a value that does not fit, in a sentence (structure_errors.py)."""

from __future__ import annotations

import collections.abc
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from itertools import cycle
from pathlib import Path, PurePath
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)

from engine.core.config.structure_errors import (
    TYPE_NAMES,
    NoMemberError,
    Place,
    UnsupportedTypeError,
    WrongTypeError,
    given_at,
    mistake_of,
    sentences_of,
    show,
)
from engine.core.errors import ConfigError, near_misses

if TYPE_CHECKING:
    from engine.core.config.tree import OptionPlace

_LISTS: Mapping[Any, type] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: tuple,
    collections.abc.Set: frozenset,
}
"""Types that are written as a list -> what is made of the list."""
_TABLES = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def structure(value: Any, kind: Any, where: str) -> tuple[Any, list[str]]:
    """Convert `value` to the type `kind`. Returns it with the problems, as sentences; with problems, do not use it."""
    try:
        return _Converter({}).structure(value, kind), []
    except Exception as error:
        return value, sentences_of(error, Place(where))


def structure_options(
    options: Mapping[str, Any],
    cls: type | None,
    where: str,
    places: Mapping[tuple[str, ...], OptionPlace] = {},
) -> Any:
    """Convert a plugin's options to an instance of its options class `cls`; None for a plugin without such a class.

    where: the plugin and its section, as errors name them. places: where the options were given, by their paths within
    `options`; errors name these places, and a relative path starts from the directory of its place.
    Raises ConfigError for an unknown key, a wrong type, or a refusal of the class itself (ValueError, TypeError or
    EngineError). Any other exception is a bug of the class and passes unchanged.
    """
    place = Place(where, places)
    if cls is None:
        if options:
            raise ConfigError(
                place.sentence(f" has no options, but {', '.join(options)} was given; leave it out", *list(options)[:1])
            )
        return None
    try:
        return _Converter(places).structure(options, cls)
    except Exception as error:
        mistake = mistake_of(error)
        if mistake is not None:
            raise mistake from None
        raise ConfigError("\n".join(sentences_of(error, place))) from error


class _Converter(cattrs.Converter):
    """Converts plain data, and knows the path of the value that is being converted, a key per table around it."""

    def __init__(self, places: Mapping[tuple[str, ...], OptionPlace]) -> None:
        super().__init__(structure_fallback_factory=_unsupported_hook, forbid_extra_keys=True)
        self._places = places
        self._path: tuple[str, ...] = ()
        for kind in (bool, int, str):
            self.register_structure_hook(kind, _exact)
        self.register_structure_hook(float, _number)
        self.register_structure_hook(PurePath, self._located)
        self.register_structure_hook(Path, self._located)
        self.register_structure_hook(bytes, _unsupported_hook(bytes))
        self.register_structure_hook_func(_is_choice, _choice)
        for applies, hook in ((_is_list, _list_hook), (_is_dict, _dict_hook), (attrs.has, _attrs_hook)):
            self.register_structure_hook_factory(applies, hook)
        self.register_structure_hook_factory(_is_union, _union_hook)

    def structure_key(self, value: Any, kind: Any, name: str) -> Any:
        """Convert the value of one key of the table that is being converted."""
        around = self._path
        self._path = (*around, name)
        try:
            return value if kind is None else self.structure(value, kind)
        finally:
            self._path = around

    def _located(self, value: Any, kind: Any) -> Any:
        """A path, with the user's home in place of ~; a relative one starts from the directory of its place."""
        if isinstance(value, PurePath):
            return kind(value)
        if not isinstance(value, str):
            raise WrongTypeError(f"expected a path, which is a string, found {_found(value)}")
        if not value:
            return kind(value)
        [directory] = [one.directory for one in given_at(self._places, self._path)[:1]] or [""]
        return kind(directory, os.path.expanduser(value))


def _unsupported_hook(kind: Any) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        raise UnsupportedTypeError(f"no setting can be converted to {_name(kind)}")

    return hook


def _exact(value: Any, kind: type) -> Any:
    if _is_choice(kind):  # an IntEnum or StrEnum, for which cattrs takes the hook of int or str
        return _choice(value, kind)
    if type(value) is not kind:
        raise WrongTypeError(f"expected {_name(kind)}, found {_found(value)}")
    return value


def _number(value: Any, _: type) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise WrongTypeError(f"expected {TYPE_NAMES[float]}, found {_found(value)}")
    return float(value)


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum))


def _choice(value: Any, kind: Any) -> Any:
    """Converts to the member of a Literal, or of an Enum, that has this value or that the Enum itself finds for it."""
    is_enum = isinstance(kind, type)
    if is_enum and isinstance(value, kind):
        return value
    choices = [(one.value, one) for one in kind] if is_enum else [(one, one) for one in get_args(kind)]
    for plain, choice in choices:
        if type(plain) is type(value) and plain == value:
            return choice
    if is_enum and type(value) is not bool:  # True == 1, but is no number
        with suppress(ValueError):
            return kind(value)
    known = [plain if isinstance(plain, str) else show(plain)[0] for plain, _ in choices]
    raise WrongTypeError(f"{show(value)[0]} is no choice; {near_misses(str(value), known)}")


def _is_list(kind: Any) -> bool:
    return (get_origin(kind) or kind) in _LISTS


def _list_hook(kind: Any, converter: Any) -> Callable[[Any, Any], Any]:
    """Converts a list or tuple item by item; refuses a string."""
    origin, arguments = get_origin(kind) or kind, get_args(kind) or (Any, ...)
    fixed = origin is tuple and arguments[-1:] != (...,)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise WrongTypeError(f"expected {TYPE_NAMES[list]}, written [a, b], found {_found(value)}")
        if fixed and len(value) != len(arguments):
            raise WrongTypeError(f"expected a list of {len(arguments)}, found {_found(value)}")
        items, errors = [], []
        for index, (one, inner) in enumerate(zip(value, arguments if fixed else cycle(arguments[:1]), strict=False)):
            try:
                items.append(converter.structure(one, inner))
            except Exception as error:
                error.add_note(IterableValidationNote(f"item {index}", index, inner))
                errors.append(error)
        if errors:
            raise IterableValidationError("wrong items", errors, kind)
        return _LISTS[origin](items)

    return hook


def _is_dict(kind: Any) -> bool:
    return (get_origin(kind) or kind) in _TABLES


def _dict_hook(kind: Any, converter: Any) -> Callable[[Any, Any], Any]:
    """Converts a table value by value."""
    key_kind, value_kind = get_args(kind) or (Any, Any)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise WrongTypeError(f"expected {TYPE_NAMES[dict]}, found {_found(value)}")
        items: dict[Any, Any] = {}
        errors = []
        for key, one in value.items():
            try:
                items[converter.structure(key, key_kind)] = converter.structure_key(one, value_kind, str(key))
            except Exception as error:
                error.add_note(IterableValidationNote(f"key {key}", str(key), value_kind))
                errors.append(error)
        if errors:
            raise IterableValidationError("wrong values", errors, kind)
        return items

    return hook


def _attrs_hook(kind: Any, converter: Any) -> Callable[[Any, Any], Any]:
    """Converts a table to an attrs class; refuses unknown keys."""
    cls = get_origin(kind) or kind
    fields = {one.name: one for one in attrs.fields(attrs.resolve_types(cls)) if one.init}
    variables = dict(zip(getattr(cls, "__parameters__", ()), get_args(kind), strict=False))

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise WrongTypeError(f"expected {TYPE_NAMES[dict]}, found {_found(value)}")
        arguments: dict[str, Any] = {}
        errors: list[Exception] = []
        for name, one in fields.items():
            try:
                if name in value:
                    arguments[one.alias] = converter.structure_key(value[name], variables.get(one.type, one.type), name)
                elif one.default is attrs.NOTHING:
                    raise KeyError(name)
            except Exception as error:
                error.add_note(AttributeValidationNote(f"option {name}", name, one.type))
                errors.append(error)
        if unknown := set(value) - set(fields):
            errors.append(ForbiddenExtraKeysError("", cls, unknown))
        if not errors:
            try:
                return cls(**arguments)
            except Exception as error:
                errors.append(error)
        raise ClassValidationError("wrong options", errors, cls)

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
        raise NoMemberError(f"expected {' or '.join(name for name, _ in tried)}, found {_found(value)}", tried)

    return hook


def _name(kind: Any) -> str:
    """A type, for people to read."""
    if _is_list(kind):
        return TYPE_NAMES[list]
    if get_origin(kind) is Literal:
        return " or ".join(show(one)[0] for one in get_args(kind))
    return TYPE_NAMES.get(kind, kind.__name__ if isinstance(kind, type) else str(kind))


def _found(value: Any) -> str:
    text, kind = show(value)
    return kind if value is None or isinstance(value, Mapping) else f"{text} ({kind})"
