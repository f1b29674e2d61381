"""The `engine` command."""

if __name__ != "engine.cli":
    raise ImportError(
        "import this package as engine.cli (pip install -e . maps it); a second copy would duplicate every class"
    )
