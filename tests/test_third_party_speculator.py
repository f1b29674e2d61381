"""examples/third_party_speculator: a package of one speculator passes its own tests, in less than 80 lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "examples" / "third_party_speculator"


def test_the_package_passes_its_tests() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-W", "error", f"--rootdir={SOURCE}", str(SOURCE / "tests")),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_speculator_is_shorter_than_80_lines() -> None:
    [module] = SOURCE.glob("src/*/__init__.py")
    assert len(module.read_text(encoding="utf-8").splitlines()) < 80
