"""Grammars: what an output must match, the contract of the libraries that enforce it, and compiling in threads."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.grammars.base import (
        CompiledGrammar as CompiledGrammar,
        GrammarBackend as GrammarBackend,
        GrammarMatcher as GrammarMatcher,
        GrammarVocabulary as GrammarVocabulary,
    )
    from engine.core.grammars.compiler import Grammars as Grammars
    from engine.core.grammars.formats import (
        Dispatch as Dispatch,
        Either as Either,
        Format as Format,
        FreeText as FreeText,
        Part as Part,
        Repeat as Repeat,
        Sequence as Sequence,
        Text as Text,
        Token as Token,
        is_open as is_open,
    )
    from engine.core.grammars.grammar import Grammar as Grammar
    from engine.core.grammars.json_schema import (
        SCHEMA_KEYWORDS as SCHEMA_KEYWORDS,
        SCHEMA_LIST_KEYWORDS as SCHEMA_LIST_KEYWORDS,
        SCHEMA_MAP_KEYWORDS as SCHEMA_MAP_KEYWORDS,
        restricts_nothing as restricts_nothing,
        schema_keywords as schema_keywords,
    )
    from engine.core.grammars.limits import check_length as check_length, schema_of as schema_of
    from engine.core.grammars.structural_tag_forms import format_of as format_of
    from engine.core.grammars.structural_tags import FormatResolver as FormatResolver
    from engine.core.grammars.tool_schemas import TOOL_LABEL as TOOL_LABEL, compile_with_tools as compile_with_tools

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "CompiledGrammar",
        "GrammarBackend",
        "GrammarMatcher",
        "GrammarVocabulary",
    ),
    compiler=("Grammars",),
    formats=(
        "Dispatch",
        "Either",
        "Format",
        "FreeText",
        "Part",
        "Repeat",
        "Sequence",
        "Text",
        "Token",
        "is_open",
    ),
    json_schema=(
        "SCHEMA_KEYWORDS",
        "SCHEMA_LIST_KEYWORDS",
        "SCHEMA_MAP_KEYWORDS",
        "restricts_nothing",
        "schema_keywords",
    ),
    grammar=("Grammar",),
    limits=("check_length", "schema_of"),
    tool_schemas=("TOOL_LABEL", "compile_with_tools"),
    structural_tag_forms=("format_of",),
    structural_tags=("FormatResolver",),
)
