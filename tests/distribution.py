"""How the tests are divided among the workers of pytest-xdist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

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
    "servers": ("server",),
    # So do these, and other processes.
    "commands": ("cli", "core/hub/test_commands.py", "scripts", "test_sample_plugin.py"),
}
"""Tests that one worker runs one after the other. The tests of any other file run in one worker too, whichever is free:
so a fixture of a module is made once."""

SLOW = (
    "core/schedulers/test_scheduler_properties.py",
    "core/test_engine_draft_model.py",
    "plugins/models/test_models_in_engine.py",
    "plugins/quant/test_w4a16.py",
    "plugins/speculators/test_eagle.py",
    "plugins/speculators/test_eagle3.py",
    "quantize/test_run.py",
    "sweeps/test_near_sweep.py",
    "sweeps/test_shape_sweep.py",
)
"""Files that take 5 s or more with few tests. They begin before the other files, lest one runs alone at the end."""

_GROUP_OF = {PurePosixPath("tests") / name: group for group, names in GROUPS.items() for name in names}
_SLOW = {f"tests/{name}" for name in SLOW}


@cache
def unit(file: str) -> str:
    """The group that a test file belongs to, or else the file: what one worker runs. file: relative to the root."""
    path = PurePosixPath(file)
    return next((_GROUP_OF[place] for place in (path, *path.parents) if place in _GROUP_OF), file)


def unit_of(nodeid: str) -> str:
    """The unit of a test."""
    return unit(nodeid.partition("::")[0])


def in_order(nodeids: Iterable[str]) -> Callable[[str], tuple[bool, bool, int]]:
    """A sort key: groups come first, since they take longest, then slow files, then files with many tests."""
    sizes = Counter(map(unit_of, nodeids))

    def place(nodeid: str) -> tuple[bool, bool, int]:
        name = unit_of(nodeid)
        return name not in GROUPS, name not in _SLOW, -sizes[name]

    return place


class FilesAndGroups(LoadScopeScheduling):
    """Gives a worker that is free the next group or file, in the order of the tests.

    pytest-xdist's own groups are marks of tests, which it hands on in their names; with pytest 9.2 they have no effect.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
