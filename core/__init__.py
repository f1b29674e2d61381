"""The contracts, and the engine that needs nothing else."""

if __name__ != "engine.core":
    raise ImportError(
        "import this package as engine.core (pip install -e . maps it); a second copy would duplicate every class"
    )
