"""Runs schemas of the JSON-Schema test suite through a grammar backend: which it refuses, and what it lets pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.grammars import CompiledGrammar, Grammar, GrammarBackend, schema_keywords
from engine.testing.grammars import matches

KEYWORDS = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const"}
    | {"contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum"}
    | {"exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"}
    | {"minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern"}
    | {"patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type"}
    | {"unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
)
"""The keywords of the drafts 4 to 2020-12 that constrain instances."""


@frozen
class SuiteSchema:
    """A schema of the suite, with instances and whether they are valid."""

    draft: str
    file: str
    description: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords of the schema that constrain instances, of those in KEYWORDS."""
        return frozenset(name for name, _, _ in schema_keywords(self.schema)) & KEYWORDS


@frozen
class Verdict:
    """What a backend makes of a schema."""

    schema: SuiteSchema
    compiled: CompiledGrammar | None
    refusal: str
    """Why the backend refuses the schema; empty if it does not."""
    wrong: tuple[Any, ...] = ()
    """Invalid instances that the grammar accepts."""
    missed: tuple[Any, ...] = ()
    """Valid instances that the grammar does not accept, as compact JSON with its keys in their order."""


def read_suite(path: Path) -> list[SuiteSchema]:
    """The schemas of a file as benchmarks/json_schema_suite/ has it."""
    return [
        SuiteSchema(draft, file, description, schema, tuple((instance, valid) for instance, valid in instances))
        for draft, file, description, schema, instances in json.loads(path.read_text(encoding="utf-8"))
    ]


def judge(backend: GrammarBackend[Any], schemas: Iterable[SuiteSchema]) -> Iterator[Verdict]:
    """Compile each schema, for the vocabulary of engine.testing.grammar_cases, and match its instances."""
    for one in schemas:
        try:
            compiled = backend.compile(Grammar.json_schema(one.schema))
        except InvalidRequestError as error:
            yield Verdict(one, None, str(error) or "(without a sentence)")
            continue
        accepted = [any(matches(compiled, text) for text in _texts(instance)) for instance, _ in one.instances]
        judged = list(zip(one.instances, accepted, strict=True))
        yield Verdict(
            one,
            compiled,
            "",
            tuple(instance for (instance, valid), taken in judged if taken and not valid),
            tuple(instance for (instance, valid), taken in judged if valid and not taken),
        )


def by_keyword(verdicts: Iterable[Verdict]) -> Mapping[str, str]:
    """Keyword -> "enforced", "partly refused", "refused" or "ignored", by the schemas that it occurs in.

    A refusal counts against a keyword only if it names the keyword. Refused: no schema with the keyword is accepted.
    """
    taken: dict[str, int] = dict.fromkeys(KEYWORDS, 0)
    named: dict[str, int] = dict.fromkeys(KEYWORDS, 0)
    wrong: set[str] = set()
    seen: set[str] = set()
    for verdict in verdicts:
        found = verdict.schema.keywords
        seen |= found
        for keyword in found:
            taken[keyword] += verdict.compiled is not None
            named[keyword] += verdict.compiled is None and keyword in verdict.refusal
        if verdict.wrong:
            wrong |= found
    return {
        keyword: (
            "ignored"
            if keyword in wrong
            else "refused"
            if not taken[keyword]
            else "partly refused"
            if named[keyword]
            else "enforced"
        )
        for keyword in sorted(seen)
    }


def _texts(instance: Any) -> set[str]:
    return {json.dumps(instance, ensure_ascii=ascii_only, separators=(",", ":")) for ascii_only in (True, False)}
