"""Sentences about values that could not be converted (structure.py), with the places where they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import attrs
from attrs import evolve, field, frozen
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)

from engine.core.errors import EngineError, near_misses

if TYPE_CHECKING:
    from engine.core.config.tree import OptionPlace

TYPE_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
    type(None): "nothing",
}
"""Type -> its name, for people to read."""
TYPES = (
    "bool, int, float, str, pathlib.Path, Literal, an Enum (by the values of its members), an attrs class, list, tuple,"
    " set, frozenset, dict, Sequence, Mapping, Any, or a union of these (X | None)"
)
"""The types that an option of a plugin may have."""


class WrongTypeError(Exception):
    """A value has another type than its setting."""


class UnsupportedTypeError(Exception):
    """An option is declared with a type to which no setting can be converted."""


class NoMemberError(Exception):
    """No member of a union accepts a value."""

    def __init__(self, message: str, tried: Sequence[tuple[str, Exception]]) -> None:
        super().__init__(message)
        self.tried = tried
        """(name of the type, for people to read; error of the conversion to that type)."""


@frozen
class Place:
    """The place of a value, as errors name it."""

    text: str
    places: Mapping[tuple[str, ...], OptionPlace] = field(factory=dict)
    """Where each value was given, by its path."""
    path: tuple[str, ...] = ()

    def of(self, error: BaseException) -> Place:
        """The place of the value in this table or list that an error is about, by the error's notes."""
        place = self
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                place = self._key(note.name)
            elif isinstance(note, IterableValidationNote):
                in_list = isinstance(note.index, int)
                place = evolve(self, text=f"{self.text}[{note.index}]") if in_list else self._key(str(note.index))
        return place

    def _key(self, name: str) -> Place:
        return evolve(self, text=f"{self.text}.{name}", path=(*self.path, name))

    def sentence(self, problem: str, *names: str) -> str:
        """A problem as a sentence that begins with where the value was given.

        names: path of the value within this one, which is a table; none: this value itself.
        """
        found = given_at(self.places, (*self.path, *names))
        origins = " and ".join(dict.fromkeys(one.origin for one in found))
        return f"{origins}: {self.text}{problem}" if origins else f"{self.text}{problem}"


def given_at(places: Mapping[tuple[str, ...], OptionPlace], path: tuple[str, ...]) -> list[OptionPlace]:
    """The places where the value at a path was given: as a whole, in parts, or within a table around it."""
    return [one for given, one in places.items() if path[: len(given)] == given or given[: len(path)] == path]


def show(value: Any) -> tuple[str, str]:
    """A value in TOML syntax, and the name of its type."""
    if isinstance(value, bool):
        return str(value).lower(), TYPE_NAMES[bool]
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"', TYPE_NAMES[str]
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(one)[0] for one in value)}]", TYPE_NAMES[list]
    return str(value), TYPE_NAMES.get(type(value), type(value).__name__)


def mistake_of(error: BaseException) -> BaseException | None:
    """The first error in a tree of cattrs errors that is a bug of the options class rather than a wrong value."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        return next(filter(None, map(mistake_of, error.exceptions)), None)
    # cattrs adds a note to the error of a single value; an error without notes comes from the class as a whole.
    meant = ValueError, TypeError, EngineError, ForbiddenExtraKeysError, WrongTypeError
    return None if hasattr(error, "__notes__") or isinstance(error, meant) else error


def sentences_of(error: BaseException, place: Place) -> list[str]:
    """The sentences of a tree of cattrs errors, each with its place."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        sentences = []
        for inner in error.exceptions:
            if isinstance(inner, UnsupportedTypeError):
                owner = getattr(error.cl, "__qualname__", error.cl)
                problem = f"{inner}, which {owner} of the plugin declares; types that work are {TYPES}"
                sentences.append(place.of(inner).sentence(f": {problem}"))
            else:
                sentences += sentences_of(inner, place.of(inner))
        return sentences
    if isinstance(error, ForbiddenExtraKeysError):
        is_attrs = attrs.has(error.cl)
        known = [one.name for one in attrs.fields(error.cl) if one.init] if is_attrs else get_type_hints(error.cl)
        return [
            place.sentence(f": there is no option {name!r}; {near_misses(name, known)}", name)
            for name in sorted(error.extra_fields)
        ]
    if isinstance(error, NoMemberError):
        reasons = [
            f"not {name}, since {', and '.join(sentences_of(one, evolve(place, places={})))}"
            for name, one in error.tried
            if not isinstance(one, WrongTypeError)  # which says no more than the sentence itself
        ]
        return ["; ".join([place.sentence(f": {error}"), *reasons])]
    if isinstance(error, KeyError):
        return [place.sentence(": this option has no default; give it")]
    # A validator of attrs puts its message first, then the attribute and the value.
    message = error.args[0] if len(error.args) > 1 and isinstance(error.args[0], str) else str(error)
    return [place.sentence(f": {message or type(error).__name__}")]
