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
    from engine.core.grammars.grammar import Grammar as Grammar
    from engine.core.grammars.limits import schema_of as schema_of
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
    grammar=("Grammar",),
    limits=("schema_of",),
    tool_schemas=("TOOL_LABEL", "compile_with_tools"),
    structural_tag_forms=("format_of",),
    structural_tags=("FormatResolver",),
)
