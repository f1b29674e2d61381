"""Fixtures and conformance suites for plugin authors."""

if __name__ != "engine.testing":
    raise ImportError(
        "import this package as engine.testing (pip install -e . maps it); a second copy would duplicate every class"
    )
