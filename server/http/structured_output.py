"""The grammar that a request asks for: `response_format` of chat, and `structured_outputs`, vLLM's, of both APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.core.protocols import convert
from engine.server.http.errors import invalid
from engine.server.http.request_bodies import Body, ChatBody, StructuredOutputs

FORMATS = ("text", "json_object", "json_schema")
"""Types of `response_format`."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. The schema is always enforced, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | None = None
    """None: any JSON object."""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format` of chat."""

    type: str
    json_schema: JsonSchemaFormat | None = None


def requested_grammar(body: Body) -> Grammar | None:
    """The grammar of a request; None: it asks for none. Raises ApiError."""
    by_format = _of_format(body.response_format) if isinstance(body, ChatBody) else None
    by_structure = _of_structure(body.structured_outputs)
    if by_format is not None and by_structure is not None:
        raise invalid("response_format and structured_outputs both ask for a grammar; give one", "structured_outputs")
    return by_format or by_structure


def parameter_of_grammar(body: Body) -> str:
    """The parameter of a request that asks for its grammar."""
    return "structured_outputs" if _given(body.structured_outputs) else "response_format"


def _of_format(given: dict[str, Any] | None) -> Grammar | None:
    if given is None:
        return None
    asked = convert(given, ResponseFormat, "response_format")
    if asked.type not in FORMATS:
        raise invalid(f"response_format.type must be one of {', '.join(FORMATS)}", "response_format.type")
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        raise invalid(
            'response_format needs json_schema with type "json_schema", and with no other',
            "response_format.json_schema",
        )
    if asked.type == "text":
        return None
    if asked.json_schema is None or asked.json_schema.schema is None:
        return Grammar.json_object()
    return _made(Grammar.json_schema, asked.json_schema.schema, "response_format.json_schema.schema")


def _given(asked: StructuredOutputs | None) -> dict[str, Any]:
    """The fields that ask for a grammar, whatever their values: `json` may be {} or false."""
    fields = {} if asked is None else msgspec.structs.asdict(asked)
    return {
        name: value for name, value in fields.items() if value is not None and (name, value) != ("json_object", False)
    }


def _of_structure(asked: StructuredOutputs | None) -> Grammar | None:
    given = _given(asked)
    if len(given) > 1:
        raise invalid(f"structured_outputs has {' and '.join(given)}; give one", "structured_outputs")
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
        "structural_tag": Grammar.structural_tag,
    }
    for name, value in given.items():
        return _made(makers[name], value, f"structured_outputs.{name}")
    return None


def _made(make: Callable[[Any], Grammar], value: Any, param: str) -> Grammar:
    try:
        return make(value)
    except InvalidRequestError as error:
        raise invalid(str(error), param) from None
