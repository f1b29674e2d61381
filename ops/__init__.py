"""Triton and C kernels by topic. They take and return plain tensors, and import nothing else of the engine."""

if __name__ != "engine.ops":
    raise ImportError("import this package as engine.ops (pip install -e . maps it)")
