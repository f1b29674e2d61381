"""A third-party package: built and installed by pip, listed, selected from a configuration file, and conformant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.testing.checkpoints import make_checkpoint

SOURCE = Path(__file__).parent / "sample_plugin"
CONFIG = """
[attention]
name = "sample-sdpa"
[attention.options]
max_keys = 100
[scheduler]
name = "shortest-first"
[cache]
memory = "4MiB"
"""

ENGINE = ("-c", "from engine.cli.main import main; main()")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the package; only a copy of the source is built in."""
    work = tmp_path_factory.mktemp("sample")
    source, target = work / "source", work / "target"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


@pytest.fixture
def run(installed: Path) -> Run:
    """Runs Python with the package installed."""

    def call(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "engine.toml").write_text(CONFIG)
    return tmp_path / "engine.toml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


def test_it_is_listed_with_distribution_and_version(run: Run) -> None:
    lines = run(*ENGINE, "plugins", "list").stdout.splitlines()
    for name in ("sample-sdpa", "shortest-first"):
        [line] = [line for line in lines if name in line]
        assert "engine-sample-plugin" in line
        assert "0.3.0" in line


def test_a_configuration_file_selects_it(run: Run, config: Path) -> None:
    shown = run(*ENGINE, "config", "show", "--config", str(config)).stdout
    for name in ("sample-sdpa", "shortest-first"):
        [line] = [line for line in shown.splitlines() if name in line]
        assert "engine.toml" in line


def test_it_generates_what_the_built_in_backend_does(run: Run, config: Path, checkpoint: Path) -> None:
    common = (*ENGINE, "generate", "def f(", "--model", str(checkpoint), "--max-tokens", "12")
    fixed = ("--temperature", "0", "--dtype", "float32", "--ignore-eos", "--json")
    ours = json.loads(run(*common, *fixed, "--config", str(config)).stdout)
    theirs = json.loads(run(*common, *fixed, "--kv-memory", "4MiB").stdout)
    assert len(ours["token_ids"]) == 12
    assert ours["token_ids"] == theirs["token_ids"]


def test_its_option_is_checked_by_its_own_class(run: Run, config: Path, checkpoint: Path) -> None:
    done = run(
        *(*ENGINE, "generate", "x", "--model", str(checkpoint), "--config", str(config)),
        *("--attention-option", "max_keys=none"),
        check=False,
    )
    assert done.returncode != 0
    assert "attention.options.max_keys: expected a whole number" in " ".join(done.stderr.split())


def test_it_passes_the_conformance_suites(run: Run, installed: Path) -> None:
    suite = installed.parent / "source" / "tests"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", str(suite))
    assert "passed" in done.stdout
    assert "failed" not in done.stdout
