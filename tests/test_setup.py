from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import engine
from engine.cli.bench import serve, server_process, startup
from engine.server.supervisor.main import Commands

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = sorted(link.name for link in (ROOT / "src" / "engine").iterdir() if link.is_symlink())
"""The packages at the top of the repository, which src/engine links to."""


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this repository's Makefile in `directory`."""
    outer = (
        "MAKEFLAGS",
        "MFLAGS",
        "MAKELEVEL",
        "MAKEOVERRIDES",
        "PYTHON",
        "VENV",
        "CONSTRAINTS",
        "ARGS",
        "TORCH_INDEX",
    )
    settled = {key: value for key, value in os.environ.items() if key not in outer}
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=directory,
        env=settled,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A clone in which nothing is installed."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def installed(fresh: Path) -> Path:
    """A clone in which every extra is noted as installed."""
    (fresh / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/python", ".installed-server", ".installed-test", ".installed-dev"):
        (fresh / ".venv" / name).touch()
    return fresh


@pytest.mark.parametrize(
    ("target", "extra", "runs"), [("serve", "server", ".venv/bin/engine serve"), ("test", "test", "-m pytest")]
)
def test_a_target_sets_up_what_it_needs(fresh: Path, target: str, extra: str, runs: str) -> None:
    lines = make(fresh, "--dry-run", target, "PYTHON=python3").stdout
    venv, install, run = lines.index("-m venv"), lines.index("pip install"), lines.rindex(runs)
    assert venv < install < run
    assert f"--editable '.[{extra}]' --constraint constraints.txt" in lines
    assert "--quiet" not in lines
    assert "several GB" in lines
    assert "download.pytorch.org/whl/cpu" in lines
    assert "--index-url" not in lines


def test_torch_can_come_from_its_own_index(fresh: Path) -> None:
    index = "https://download.pytorch.org/whl/cpu"
    lines = make(fresh, "--dry-run", "serve", f"TORCH_INDEX={index}").stdout
    torch = lines.index(
        f"pip install --disable-pip-version-check --no-compile torch --index-url {index} --constraint constraints.txt"
    )
    assert torch < lines.index("--editable '.[server]' --constraint constraints.txt")
    assert "several GB" not in lines


def test_a_target_sets_up_only_once(installed: Path) -> None:
    lines = make(installed, "--dry-run", "serve").stdout.splitlines()
    assert lines == [".venv/bin/engine serve "]


def test_a_changed_list_of_requirements_is_installed_again(installed: Path) -> None:
    later = (installed / ".venv" / ".installed-server").stat().st_mtime + 10
    os.utime(installed / "pyproject.toml", (later, later))
    assert "pip install" in make(installed, "--dry-run", "serve").stdout


def test_the_browser_test_installs_its_packages_next_to_the_others(installed: Path) -> None:
    lines = make(installed, "--dry-run", "browser-test", "SCREENSHOTS=pictures").stdout
    assert "--target build/browser playwright --constraint constraints.txt" in lines
    assert (
        "BROWSER_PACKAGES=build/browser SCREENSHOTS=pictures .venv/bin/python -m pytest tests/server/browser" in lines
    )
    (installed / "build" / "browser").mkdir(parents=True)
    (installed / "build" / "browser" / ".installed").touch()
    assert "pip install" not in make(installed, "--dry-run", "browser-test").stdout


def test_the_extra_dev_brings_the_others(fresh: Path) -> None:
    python = fresh / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    assert make(fresh, ".venv/.installed-dev").returncode == 0
    for target in ("test", "site", "serve"):
        assert "pip install" not in make(fresh, "--dry-run", target).stdout
    extras = PROJECT["project"]["optional-dependencies"]
    assert "pluggable-llm-engine[docs,test]" in extras["dev"]
    assert "server" in extras["test"][0]


def test_the_constraints_can_be_dropped(fresh: Path) -> None:
    done = make(fresh, "--dry-run", "serve", "CONSTRAINTS=")
    assert done.returncode == 0
    assert "--editable" in done.stdout
    assert "--constraint" not in done.stdout


def test_bare_make_checks_everything(installed: Path) -> None:
    lines = make(installed, "--dry-run").stdout
    for step in ("ruff check .", "ruff format --check .", "scripts/typecheck", "-m pytest"):
        assert step in lines


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", None], ids=["old", "missing"])
def test_an_old_or_missing_python_is_an_error(fresh: Path, script: str | None) -> None:
    python = fresh / "python-old"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    done = make(fresh, "serve", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"error: {python} is missing or older than 3.11" in done.stderr
    assert not (fresh / ".venv").exists()


def test_ci_runs_the_tests_and_all_checks() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    for step in ("make test", "lint", "format", "types", "site"):
        assert step in script
    for path in (".ci/run", "scripts/typecheck"):
        assert os.access(ROOT / path, os.X_OK), f"{path} is not executable"


def test_pre_commit_downloads_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert {hook["id"] for repo in config["repos"] for hook in repo["hooks"]} == {"ruff", "ruff-format", "typecheck"}
    assert all(hook["language"] == "system" for repo in config["repos"] for hook in repo["hooks"])


def test_every_package_of_the_tree_has_a_link() -> None:
    top = {init.parent.name for init in ROOT.glob("*/__init__.py")}
    assert set(PACKAGES) == top - {"tests", "scripts"}
    for package in PACKAGES:
        assert (ROOT / "src" / "engine" / package).readlink() == Path("..", "..", package)


def test_the_type_checker_sees_every_package() -> None:
    script = (ROOT / "scripts" / "typecheck").read_text(encoding="utf-8")
    assert "-p engine\n" in script
    assert PROJECT["tool"]["mypy"]["mypy_path"] == "src"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel is built from."""
    source = tmp_path_factory.mktemp("source")
    for directory in PACKAGES:
        shutil.copytree(ROOT / directory, source / directory, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "src", source / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, source)
    return source


def build_wheel(source: Path, target: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what pip printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", target, source],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(source / "build")
    [wheel] = target.glob("*.whl")
    return wheel, done.stdout + done.stderr


def test_a_wheel_built_without_a_compiler_says_so_and_fits_any_platform(source: Path, tmp_path: Path) -> None:
    wheel, printed = build_wheel(source, tmp_path, CC="false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "engine.ops.attention._paged was not built: attention on a CPU is slower" in printed
    assert "engine.core.shm._ring was not built" in printed
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_the_wheel_holds_all_packages_and_their_data(source: Path, tmp_path: Path) -> None:
    wheel, printed = build_wheel(source, tmp_path)
    assert "was not built" not in printed
    assert "none-any" not in wheel.name
    held = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    wanted = {
        Path("engine", file.relative_to(source))
        for directory in PACKAGES
        for file in (source / directory).rglob("*.py")
    }
    data = {Path("engine/demo/engine-demo", file.name) for file in (source / "demo" / "engine-demo").glob("*")}
    data |= {Path("engine/server/page", file.name) for file in (source / "server" / "page").glob("*")}
    data |= {Path("engine", file.relative_to(source)) for file in (source / "core/autotune/choices").glob("*.json")}
    data.add(Path("engine/cli/profile/flame.html"))
    built = {path for path in held if path.suffix in {".c", ".h", ".so"}}
    assert {path.name.partition(".")[0] for path in built} == {"_paged", "_ring"}
    assert {path for path in held - built if path.parts[0] == "engine"} == {
        *wanted,
        *data,
        Path("engine/__init__.py"),
        Path("engine/__main__.py"),
        Path("engine/py.typed"),
    }
    scripts = next(path for path in held if path.name == "entry_points.txt")
    text = zipfile.ZipFile(wheel).read(str(scripts)).decode()
    assert "engine = engine.cli.main:main" in text
    assert "builtin = engine.plugins:BUILTINS" in text


def test_python_dash_m_the_command_and_the_package_agree_on_the_version() -> None:
    run = [sys.executable, "-P", "-m", "engine", "--version"]
    assert subprocess.check_output(run, text=True) == f"engine {engine.__version__}\n"
    assert engine.__version__ == PROJECT["project"]["version"]


def test_an_engine_py_of_the_user_changes_nothing_for_the_command_and_its_processes(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("raise SystemExit('the wrong engine')")
    script = [sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "--version"]
    assert subprocess.check_output(script, text=True, cwd=tmp_path) == f"engine {engine.__version__}\n"
    started = [startup.COMMAND, server_process.COMMAND, serve.COMMAND, Commands().engine, Commands().front_end]
    assert all("-P" in command for command in started)


def test_type_checkers_of_other_projects_follow_an_editable_install() -> None:
    """setuptools writes a path for packages below one directory; for others, a hook that checkers do not follow."""
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"": "src"}
    assert PROJECT["tool"]["pyright"]["extraPaths"] == ["src"]
    assert (ROOT / "src" / "engine" / "py.typed").exists()
