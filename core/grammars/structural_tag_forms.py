"""The form of structural tags: XGrammar's language for formats, as far as all built-in backends express it.

See https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any, Final

from engine.core.grammars.grammar import JSON_SCHEMA, LARK, REGEX, Grammar, refusal

FIELDS: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    "any_text": {"excludes": list},
    "const_string": {"value": str},
    "json_schema": {"json_schema": (dict, bool)},
    "lark": {"grammar": str},
    "optional": {"content": dict},
    "or": {"elements": list},
    "plus": {"content": dict},
    "regex": {"pattern": str},
    "repeat": {"min": int, "max": int, "content": dict},
    "sequence": {"elements": list},
    "star": {"content": dict},
    "tag": {"begin": (str, dict), "content": dict, "end": (str, list, dict)},
    "tags_with_separator": {"tags": list, "separator": str, "at_least_one": bool, "stop_after_first": bool},
    "token": {"token": (str, int)},
    "token_triggered_tags": {
        "trigger_tokens": list,
        "tags": list,
        "exclude_tokens": list,
        "at_least_one": bool,
        "stop_after_first": bool,
    },
    "triggered_tags": {
        "triggers": list,
        "tags": list,
        "excludes": list,
        "at_least_one": bool,
        "stop_after_first": bool,
    },
}
"""Type of a format -> the types of its fields."""
OPTIONAL: Final = frozenset({"at_least_one", "exclude_tokens", "excludes", "stop_after_first"})
"""Fields that may be left out."""
PLAIN: Final[Mapping[str, Sequence[Any]]] = {
    "any_order": (False,),
    "max_chars": (None,),
    "max_tokens": (None,),
    "max_whitespace_cnt": (None,),
    "style": ("json",),
}
"""Fields of XGrammar's language that are accepted only with the values listed, which change nothing."""
MAX_REPEATS: Final = 10_000
"""Highest bound of a `repeat`."""
PARTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Grammar]]] = {
    "json_schema": lambda given: Grammar.json_schema(given["json_schema"]),
    "lark": lambda given: Grammar.lark(given["grammar"]),
    "regex": lambda given: Grammar.regex(given["pattern"]),
}
"""Type of a format that is a grammar -> makes the grammar."""
_INSIDE: Final = ("content", "elements", "tags")
"""Fields that hold formats."""


def checked_source(given: Mapping[str, Any] | str) -> str:
    """A structural tag as JSON: {"type": "structural_tag", "format": ...}. Raises InvalidRequestError.

    given: such an object, the format alone, or vLLM's older form with `structures` and `triggers`; as a mapping or
    JSON.
    """
    try:
        tag: Any = json.loads(given) if isinstance(given, str) else given
        if not isinstance(tag, Mapping):
            raise refusal("a structural tag must be an object")
        tag = dict(tag)
        if tag.get("type") == "structural_tag":
            unknown = set(tag) - {"type", "format", "structures", "triggers"}
            if unknown or ("format" in tag) == bool({"structures", "triggers"} & set(tag)):
                raise refusal("a structural tag must have either the field format, or structures and triggers, only")
            tag = tag["format"] if "format" in tag else _of_structures(tag)
        check_format(tag)
        return json.dumps({"type": "structural_tag", "format": tag}, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise refusal(f"the structural tag is not JSON: {error}") from None
    except RecursionError:
        raise refusal("the structural tag is nested too deep") from None


def check_format(given: Any) -> None:
    """Raise InvalidRequestError for a format that is not of the right form, or not of the built-in language."""
    for _ in _formats(given):
        pass


def part_grammars(source: str) -> Iterator[Grammar]:
    """The grammars inside a structural tag."""
    for one in _formats(json.loads(source)["format"]):
        if one["type"] in PARTS:
            yield PARTS[one["type"]](one)


def format_of(grammar: Grammar) -> dict[str, Any]:
    """The format of the outputs that match a grammar of any kind that formats can hold. Raises InvalidRequestError."""
    if grammar.kind == JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": json.loads(grammar.source)}
    if grammar.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if grammar.kind == REGEX:
        return {"type": "regex", "pattern": grammar.source}
    if grammar.kind == "choice":
        texts = json.loads(grammar.source)
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    if grammar.kind == LARK:
        return {"type": "lark", "grammar": grammar.source}
    if grammar.kind == "structural_tag":
        made: dict[str, Any] = json.loads(grammar.source)["format"]
        return made
    raise refusal(f"a grammar of the kind {grammar.kind!r} cannot be a part of a structural tag")


def _formats(given: Any) -> Iterator[Mapping[str, Any]]:
    """A format and all inside of it, each checked."""
    if not isinstance(given, dict):
        raise refusal(f"a format of a structural tag must be an object, not {shortened(given)}")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise refusal(f"structural tags have no format {shortened(kind)} here; they have {', '.join(sorted(FIELDS))}")
    for name in {**FIELDS[kind], **given}:
        _check_field(kind, name, given)
    yield given
    for name in _INSIDE:
        inside = given.get(name, [])
        for one in inside if isinstance(inside, list) else [inside]:
            if name == "tags" and not (isinstance(one, dict) and one.get("type") == "tag"):
                raise refusal(f"the tags of {kind} must be formats of the type tag")
            yield from _formats(one)


def _check_field(kind: str, name: str, given: Mapping[str, Any]) -> None:
    where = f"{name} of the format {kind}"
    if name == "type":
        return
    if name not in FIELDS[kind]:
        if name not in PLAIN or given[name] not in PLAIN[name]:
            raise refusal(f"{where} is not supported; leave it out")
        return
    if name not in given:
        if name not in OPTIONAL:
            raise refusal(f"the format {kind} of a structural tag needs {name}")
        return
    value: Any = given[name]
    types = FIELDS[kind][name]
    if not isinstance(value, types) or (isinstance(value, bool) and types in (int, (str, int))):
        raise refusal(f"{where} must not be {shortened(value)}")
    if isinstance(value, list):
        _check_list(where, name, value)
    elif name in ("begin", "end") and isinstance(value, dict):
        token = value.get("token")
        if set(value) != {"type", "token"} or value["type"] != "token" or type(token) not in (str, int):
            raise refusal(f"{where} must be a text or a format of the type token")
    elif kind == "token" and not value and value != 0:
        raise refusal(f"{where} must not be empty")
    if kind == "repeat" and name == "max" and not _is_range(given["min"], value):
        raise refusal(f"min and max of the format repeat must be from 0 to {MAX_REPEATS}, in order; max may be -1")


def _is_range(low: Any, high: Any) -> bool:
    return type(low) is int and 0 <= low <= MAX_REPEATS and (high == -1 or low <= high <= MAX_REPEATS)


def _check_list(where: str, name: str, value: list[Any]) -> None:
    if not value and name not in ("excludes", "exclude_tokens"):
        raise refusal(f"{where} must not be empty")
    if name in ("elements", "tags"):
        return
    types = (str, int) if name in ("trigger_tokens", "exclude_tokens") else (str,)
    if not all(type(one) in types for one in value) or ("" in value and name != "end"):
        raise refusal(f"{where} must be a list of {'tokens' if len(types) > 1 else 'texts'}, none of them empty")


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The format of vLLM's older form."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise refusal("structures of a structural tag must be a list of objects with begin, schema and end")
    for one in structures:
        if set(one) != {"begin", "schema", "end"}:
            raise refusal("each of the structures of a structural tag must have begin, schema and end, only")
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}
