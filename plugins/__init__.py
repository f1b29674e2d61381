"""The built-in plugins. They come in by the entry point that third parties use (see pyproject.toml)."""

if __name__ != "engine.plugins":
    raise ImportError(
        "import this package as engine.plugins (pip install -e . maps it); a second copy would duplicate every class"
    )

BUILTINS = (
    "engine.plugins.attention",
    "engine.plugins.executors",
    "engine.plugins.grammars",
    "engine.plugins.models",
    "engine.plugins.parsers",
    "engine.plugins.protocols",
    "engine.plugins.quant",
    "engine.plugins.schedulers",
    "engine.plugins.speculators",
)
"""Modules with hook implementations; importing one imports nothing heavy."""
