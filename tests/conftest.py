"""What all tests share: few threads, and no GPU tests where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read when torch is first imported, here and in the processes that tests start; tiny models run fastest on few threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")

# Read when a kernel is defined: without a GPU, Triton's interpreter runs the kernels on tensors in the CPU's memory.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A package of its own, whose tests test_sample_plugin.py runs where it has installed it.
collect_ignore = ["sample_plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where torch sees none; torch is imported only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
