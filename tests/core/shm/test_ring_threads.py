"""_ring.c under ThreadSanitizer: threads of one program take the parts of the processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "core" / "shm"
ORDERED = "atomic_store(&ring->published, ++end->sequence);"
RELAXED = "atomic_store_explicit(&ring->published, ++end->sequence, memory_order_relaxed);"


def build(directory: Path, include: Path) -> Path:
    program = directory / "ring_threads"
    command = ["gcc", "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{include}", f"-I{SOURCE}"]
    try:
        subprocess.run([*command, HERE / "ring_threads.c", "-o", program], check=True, capture_output=True, text=True)
        subprocess.run([program, "0"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"gcc builds no program with ThreadSanitizer here: {error}")
    return program


def run(program: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(rounds)], capture_output=True, text=True, check=False, timeout=90)


def test_no_race_and_nothing_torn_lost_or_hung(tmp_path: Path) -> None:
    done = run(build(tmp_path, SOURCE), 60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "60 rounds\n"


def test_a_race_would_be_found(tmp_path: Path) -> None:
    code = (SOURCE / "_ring.c").read_text(encoding="utf-8")
    assert ORDERED in code
    (tmp_path / "_ring.c").write_text(code.replace(ORDERED, RELAXED), encoding="utf-8")
    done = run(build(tmp_path, tmp_path), 60)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
