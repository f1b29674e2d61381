"""The CUDA driver's library."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from engine.ops.common import cuda_driver
from engine.ops.common.cuda_driver import open_driver


def test_each_caller_has_the_library_as_an_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(ctypes, "CDLL", Library)
    one: Any = open_driver()
    other: Any = open_driver()
    assert one is not other
    assert one.name == other.name == cuda_driver.LIBRARY == "libcuda.so.1"


def test_the_module_imports_neither_torch_nor_triton() -> None:
    """A start on a GPU opens the driver in a thread before torch is imported."""
    script = (
        "import sys, engine.ops.common.cuda_driver\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'imported something slow'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
