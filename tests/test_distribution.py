"""How the tests are divided among the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distribution import GROUPS, SLOW, FilesAndGroups, in_order, unit_of

HERE = Path(__file__).parent


def test_every_path_exists_and_no_two_groups_share_one() -> None:
    paths = [path for paths in GROUPS.values() for path in paths]
    assert [path for path in (*paths, *SLOW) if not (HERE / path).exists()] == []
    assert len(set(paths)) == len(paths)


def test_slow_files_are_in_no_group() -> None:
    assert [path for path in SLOW if unit_of(f"tests/{path}::test_a") in GROUPS] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests/core/shm/test_ring.py::test_a[x::y]", "shared memory"),
        ("tests/server/test_faults.py::test_a", "shared memory"),
        ("tests/server/http/test_http.py::TestA::test_a", "servers"),
        ("tests/cli/test_main.py::test_a", "commands"),
        ("tests/core/test_host.py::test_a", "tests/core/test_host.py"),
    ],
)
def test_a_test_runs_with_its_group_or_file(name: str, expected: str) -> None:
    assert unit_of(name) == expected
    assert FilesAndGroups._split_scope(object.__new__(FilesAndGroups), name) == expected


def test_groups_run_first_then_slow_files_and_then_files_with_many_tests() -> None:
    slow = f"tests/{SLOW[0]}::test_a"
    few, many = "tests/core/test_host.py::test_a", [f"tests/core/test_lazy.py::test_{letter}" for letter in "abc"]
    group = ["tests/cli/test_main.py::test_a", "tests/scripts/test_stress.py::test_a"]
    found = [group[0], few, *many, slow, group[1]]
    assert sorted(found, key=in_order(found)) == [*group, slow, *many, few]
