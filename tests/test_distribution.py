"""How the tests are divided among the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distribution import GROUPS, FilesAndGroups, in_order, unit_of

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
    assert unit_of(name) == expected
    assert FilesAndGroups._split_scope(object.__new__(FilesAndGroups), name) == expected


def test_groups_run_first_and_then_files_with_many_tests() -> None:
    few, many = "tests/core/test_host.py::test_a", [f"tests/core/test_lazy.py::test_{letter}" for letter in "abc"]
    group = ["tests/cli/test_main.py::test_a", "tests/scripts/test_stress.py::test_a"]
    found = [group[0], few, *many, group[1]]
    assert sorted(found, key=in_order(found)) == [*group, *many, few]
