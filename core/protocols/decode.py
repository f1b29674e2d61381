"""Decodes parts of a request's body whose types depend on other parts, and makes refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from engine.core.protocols.errors import ApiError

T = TypeVar("T")

_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def convert(value: object, kind: type[T], where: str) -> T:
    """`value`, decoded from JSON, as an object of a type. Raises ApiError with status 400.

    where: the parameter that the value is, such as `messages[0]`, for refusals.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), where) from None


def explain(message: str, parent: str = "", *, replaced: Mapping[str, str] = {}) -> ApiError:
    """Turn msgspec's message into a sentence that begins with the parameter's name.

    parent: the parameter that holds it. replaced: parameters that take only null, and what to use instead.
    """
    path = _PATH.search(message)
    where = ".".join(filter(None, (parent, path.group(1) if path else "")))
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
    reason = reason[:1].lower() + reason[1:].replace("`", "")
    return invalid(f"{where or 'the body'}: {reason}", where or None, "invalid_type")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError with status 400, for the parameter `param`."""
    return ApiError(400, message, param=param, code=code)
