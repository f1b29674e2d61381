"""Serves large language models, with a plugin for every part that engines differ in. Start with `engine.core.Engine`.

The packages lie at the top of the repository; the links in this folder give them their import names.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pluggable-llm-engine")
        except PackageNotFoundError:  # a checkout on the path that was never installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
