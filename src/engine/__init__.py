"""Serves large language models; every contested part is a plugin. `engine.core.Engine` is where Python starts.

The packages lie at the top of the repository; the links in this folder give them their import names.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pluggable-llm-engine")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
