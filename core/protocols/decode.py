"""Decodes parts of a request's body whose types depend on other parts, and makes refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec.inspect import CollectionType, DictType, LiteralType, StructType, Type, UnionType, type_info

from engine.core.protocols.errors import ApiError

T = TypeVar("T")

_info = lru_cache(type_info)

_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
"""One name or index of such a path."""
_NO_CHOICE = "Invalid enum value "


def convert(value: object, kind: type[T], where: str) -> T:
    """`value`, decoded from JSON, as an object of a type. Raises ApiError with status 400.

    Unknown fields are refused unless they are null: null means not given. where: the parameter that the value is, such
    as `messages[0]`, for refusals.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        refusal = str(error)
    if has_unknown_field(refusal):
        try:
            return msgspec.convert(without_unknown_nulls(value, kind), kind)
        except msgspec.ValidationError as error:
            refusal = str(error)
    raise explain(refusal, where, kind=kind)


def has_unknown_field(message: str) -> bool:
    """Whether msgspec's message says that a value has a field which its type does not have."""
    return _UNKNOWN.search(message) is not None


def without_unknown_nulls(value: object, kind: type) -> object:
    """`value`, decoded from JSON, without the null fields that the structures of a type do not have."""
    return _without_nulls(value, _info(kind))


def _without_nulls(value: object, kind: Type) -> object:
    """See `without_unknown_nulls`. kind: msgspec's description of the type."""
    if not _has_fields(kind):  # such as a prompt of a million tokens
        return value
    if isinstance(kind, UnionType):
        for one in kind.types:
            value = _without_nulls(value, one)
    elif isinstance(kind, CollectionType) and isinstance(value, list):
        return [_without_nulls(one, kind.item_type) for one in value]
    elif isinstance(kind, DictType) and isinstance(value, dict):
        return {name: _without_nulls(one, kind.value_type) for name, one in value.items()}
    elif isinstance(kind, StructType) and isinstance(value, dict):
        if kind.tag_field is not None and value.get(kind.tag_field) != kind.tag:  # another structure of the union
            return value
        types = {field.encode_name: field.type for field in kind.fields}
        return {
            name: _without_nulls(one, types[name]) if name in types else one
            for name, one in value.items()
            if one is not None or name in types
        }
    return value


def _has_fields(kind: Type) -> bool:
    """Whether values of a type may be, or may contain, structures."""
    if isinstance(kind, UnionType):
        return any(map(_has_fields, kind.types))
    if isinstance(kind, CollectionType):
        return _has_fields(kind.item_type)
    return _has_fields(kind.value_type) if isinstance(kind, DictType) else isinstance(kind, StructType)


def _choices(kind: Type, path: Sequence[str]) -> list[object]:
    """The values that a type lists for what is at a path in it; none where it lists no values."""
    if isinstance(kind, UnionType):
        return [value for one in kind.types for value in _choices(one, path)]
    if not path:
        return list(kind.values) if isinstance(kind, LiteralType) else []
    if isinstance(kind, StructType):
        return [value for one in kind.fields if one.encode_name == path[0] for value in _choices(one.type, path[1:])]
    if isinstance(kind, CollectionType):
        return _choices(kind.item_type, path[1:])
    return _choices(kind.value_type, path[1:]) if isinstance(kind, DictType) else []


def explain(message: str, parent: str = "", *, kind: type | None = None, replaced: Mapping[str, str] = {}) -> ApiError:
    """Turn msgspec's message into a sentence that begins with the parameter's name.

    parent: the parameter that holds it. kind: the type that was to be decoded, for the values that it lists.
    replaced: parameters that take only null, and what to use instead.
    """
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    where = ".".join(filter(None, (parent, path)))
    reason = _PATH.sub("", message)
    if match := _UNKNOWN.search(reason):
        name = f"{where}.{match.group(1)}".lstrip(".")
        return invalid(f"{name} is not a parameter of this server; leave it out", name, "unknown_parameter")
    if match := _MISSING.search(reason):
        name = f"{where}.{match.group(1)}".lstrip(".")
        return invalid(f"{name} is missing", name, "missing_required_parameter")
    if reason.startswith("Expected `null`"):
        instead = f"use {replaced[where]} instead" if where in replaced else "leave it out"
        return invalid(f"{where} is not supported by this server; {instead}", where, "unsupported_parameter")
    choices = _choices(_info(kind), _STEP.findall(path)) if kind and reason.startswith(_NO_CHOICE) else []
    if choices:
        allowed = " or ".join(map(str, choices))
        return invalid(f"{where} is {reason.removeprefix(_NO_CHOICE)}; it must be {allowed}", where, "invalid_type")
    reason = reason[:1].lower() + reason[1:].replace("`", "")
    return invalid(f"{where or 'the body'}: {reason}", where or None, "invalid_type")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError with status 400, for the parameter `param`."""
    return ApiError(400, message, param=param, code=code)
