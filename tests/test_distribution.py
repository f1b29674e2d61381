"""How the tests are divided among the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distribution import GROUPS, FilesAndGroups, unit

HERE = Path(__file__).parent


def test_every_path_of_a_group_exists_and_is_in_one_group() -> None:
    paths = [path for paths in GROUPS.values() for path in paths]
    assert [path for path in paths if not (HERE / path).exists()] == []
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests/core/shm/test_ring.py::test_a[x::y]", "shared memory"),
        ("tests/server/test_faults.py::test_a", "shared memory"),
        ("tests/server/http/test_http.py::TestA::test_a", "servers"),
        ("tests/core/test_host.py::test_a", "tests/core/test_host.py"),
    ],
)
def test_a_test_runs_with_its_group_or_file(name: str, expected: str) -> None:
    assert unit(name.partition("::")[0]) == expected
    assert FilesAndGroups._split_scope(object.__new__(FilesAndGroups), name) == expected
