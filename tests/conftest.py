"""What all tests share: few threads, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.interpreter import quicken

# Read when torch is first imported, here and in the processes that tests start; tiny models run fastest on few threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when a kernel is defined: without a GPU, Triton's interpreter runs the kernels on tensors in the CPU's memory.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A package of its own, whose tests test_sample_plugin.py runs where it has installed it.
collect_ignore = ["sample_plugin"]


GROUPS = {
    # These use shared memory, or check that none is left in /dev/shm.
    "shared memory": (
        "core/distributed",
        "core/shm",
        "ops/norm/test_all_reduce_rms_norm.py",
        "plugins/executors",
        "plugins/quant/test_ranks.py",
        "server/test_faults.py",
        "test_benchmarks.py",
        "test_docs_plugins.py",
        "testing/test_executors.py",
    ),
    # These start servers, which share fixtures and mostly wait.
    "servers": ("cli", "core/hub/test_commands.py", "scripts", "server", "test_sample_plugin.py"),
}
"""Tests that one pytest-xdist worker runs one after the other; all other tests go to any worker."""


def pytest_configure() -> None:
    """Accept Ctrl-C: a shell starts its background jobs with SIGINT ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports make millions of objects that stay: passes of the garbage collector over them free nothing, here and later.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what has been imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Make Triton's interpreter quicker, if it was imported."""
    quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign tests to their groups; skip those marked gpu or interpreter where these are missing."""
    here = Path(__file__).parent
    group_of = {here / name: group for group, names in GROUPS.items() for name in names}

    @cache
    def find_group(path: Path) -> str | None:
        return next((group_of[place] for place in (path, *path.parents) if place in group_of), None)

    for item in items:
        group = find_group(item.path)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("interpreter") is not None and not os.environ.get("TRITON_INTERPRET"):
            item.add_marker(pytest.mark.skip(reason="Triton compiles for the GPU here"))
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes an installed distribution: install("dist", "1.0", module="source", entry="name")."""

    def make(distribution: str, version: str, source: str, *, entry: str, target: str | None = None) -> None:
        module = f"{distribution.replace('-', '_')}_module"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[engine]\n{entry} = {target or module}\n")
        if str(tmp_path) not in sys.path:
            monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield make
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


TIDAL = """
from engine.core.hooks import hookimpl

@hookimpl
def register_attention(register):
    register("tidal", load, api="1", summary="")

def load():
    from engine.plugins.attention.torch import TorchAttention

    class Tidal(TorchAttention):
        def __init__(self, spec, pool, options):
            raise KeyError("tide")

    return Tidal
"""


@pytest.fixture
def tidal(install: Callable[..., None]) -> None:
    """The distribution engine-tidal 0.4, whose attention backend cannot be made."""
    install("engine-tidal", "0.4", TIDAL, entry="tidal")
