"""A grammar that an output must match, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Any, Final

from attrs import field, frozen

from engine.core.errors import InvalidRequestError
from engine.core.unicode import is_unicode

JSON_SCHEMA: Final = "json_schema"
JSON_OBJECT: Final = "json_object"
REGEX: Final = "regex"
CHOICE: Final = "choice"
LARK: Final = "lark"
STRUCTURAL_TAG: Final = "structural_tag"
PARAMETER: Final = "grammar"
"""The field of SamplingParams, as errors name it."""


def _text(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: a text that is Unicode."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{attribute.name} of a grammar must be a text, not {shortened(value)}", PARAMETER)
    if not is_unicode(value):
        raise InvalidRequestError("the grammar has half of a surrogate pair, so it is not Unicode", PARAMETER)


@frozen
class Grammar:
    """What an output must match. Made by a class method, or directly for another kind that a grammar plugin knows.

    Raises InvalidRequestError for a value of the wrong form. Whether the grammar can be enforced turns out when the
    engine compiles it.
    """

    kind: str = field(validator=_text)
    """json_schema, json_object, regex, choice, lark, structural_tag, or a name that a grammar plugin knows."""
    source: str = field(default="", validator=_text, repr=shortened)
    """The grammar in its own language; for a choice, its texts as a JSON list."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema allows. schema: as a mapping, or as JSON."""
        if not isinstance(schema, str):
            return cls(JSON_SCHEMA, _json(schema, "a JSON schema"))
        try:
            json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the JSON schema is not JSON: {error}", PARAMETER) from None
        return cls(JSON_SCHEMA, schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        return cls(REGEX, pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if (
            isinstance(texts, str)
            or not isinstance(texts, Sequence)
            or not all(isinstance(text, str) for text in texts)
        ):
            raise InvalidRequestError(f"a choice must be a list of texts, not {shortened(texts)}", PARAMETER)
        if not all(texts) or not texts:
            raise InvalidRequestError("a choice needs at least one text, and none may be empty", PARAMETER)
        return cls(CHOICE, _json(list(texts), "a choice"))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A text that a context-free grammar in Lark's language matches, from its rule `start`."""
        return cls(LARK, source)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Grammar:
        """A format of texts, special tokens, free text, and parts that match grammars (docs/structured-output.md).

        tag: {"type": "structural_tag", "format": ...} or the inner format alone; as a mapping, or as JSON.
        """
        from engine.core.grammars.structural_tag_forms import checked_source

        return cls(STRUCTURAL_TAG, checked_source(tag))


def refusal(sentence: str) -> InvalidRequestError:
    """The error for a grammar that is not of the right form, or cannot be enforced."""
    return InvalidRequestError(sentence, PARAMETER)


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} cannot be written as JSON: {error}", PARAMETER) from None
