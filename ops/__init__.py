"""Triton and C kernels by topic. They take and return plain tensors, and import nothing else of the engine.

docs/kernels.md lists what plugins may call.
"""

import os

if __name__ != "engine.ops":
    raise ImportError("import this package as engine.ops (pip install -e . maps it)")

# Read when Triton compiles a kernel. All kernels are measured and tested with multiplications and additions fused,
# which Triton 3.10 does only on request; 3.9 warns of that change in each process.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
