"""What all tests share: few threads, property tests without deadlines, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.interpreter import quicken

# An example may take long on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Read when torch is first imported, here and in the processes that tests start; tiny models run fastest on few threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when a kernel is defined: without a GPU, Triton's interpreter runs the kernels on tensors in the CPU's memory.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# They have environments of their own: see test_sample_plugin.py, and `make clients`.
collect_ignore = ["sample_plugin", "clients"]


def pytest_configure() -> None:
    """Accept Ctrl-C: a shell starts its background jobs with SIGINT ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports make millions of objects that stay: passes of the garbage collector over them free nothing, here and later.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """After the last test of a file, collect its garbage; later passes skip what is left.

    Otherwise the garbage of one file is closed during another's tests, and every pass takes 0.7 s once a test has
    unfrozen the millions of objects that imports make.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_runtest_setup() -> None:
    """Seed torch, if it was imported, so that a test's data do not depend on the tests before; quicken Triton's
    interpreter, if it was imported.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    quicken()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Divide the tests among the workers by groups and files; see distribution.py."""
    from tests.distribution import FilesAndGroups

    return FilesAndGroups(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests for the workers of pytest-xdist; skip those marked gpu or interpreter where these are missing."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.distribution import in_order

        place = in_order(item.nodeid for item in items)
        items.sort(key=lambda item: place(item.nodeid))
    for item in items:
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


@pytest.fixture
def count_tensors() -> Iterator[Callable[[], int]]:
    """Counts the tensors that exist. No garbage is collected during the test, unless what it tests does so."""
    import torch

    gc.collect()
    gc.disable()
    yield lambda: sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    gc.enable()
