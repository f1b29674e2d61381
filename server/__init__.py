"""OpenAI-compatible HTTP in front of an engine process."""

if __name__ != "engine.server":
    raise ImportError(
        "import this package as engine.server (pip install -e . maps it); a second copy would duplicate every class"
    )
