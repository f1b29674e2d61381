"""Built-in grammar backends."""

from engine.core.hooks import Register, hookimpl, lazy


@hookimpl
def register_grammars(register: Register) -> None:
    """Register the built-in grammar backends."""
    register(
        "llguidance",
        lazy("engine.plugins.grammars.llguidance:LLGuidance"),
        api="1",
        summary="JSON schemas, regular expressions, choices, Lark grammars and structural tags, by llguidance",
        preference=10,
    )
    register(
        "xgrammar",
        lazy("engine.plugins.grammars.xgrammar:XGrammar"),
        api="1",
        summary="JSON schemas, regular expressions, choices and structural tags, by XGrammar",
        preference=5,
    )
