"""Which start of a configuration is the first, and when the compile server is started early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from engine.core.compilation import first_start
from engine.core.compilation.client import SHARED
from engine.core.compilation.first_start import begin_first_start, is_first_start, mark_started
from engine.core.config.tree import EngineConfig


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def with_settings(section: str, **settings: Any) -> EngineConfig:
    config = EngineConfig()
    return evolve(config, **{section: evolve(getattr(config, section), **settings)})


def test_the_first_start_of_each_configuration_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_first_start(EngineConfig())
    mark_started(EngineConfig())
    assert not is_first_start(EngineConfig())
    assert not is_first_start(with_settings("scheduler", max_running=3)), "what the device settles"
    assert is_first_start(with_settings("quant", name="fp8"))
    monkeypatch.setattr(first_start, "_newest_kernel", lambda: 0.0)
    assert is_first_start(EngineConfig()), "other kernels"
    mark_started(EngineConfig())
    monkeypatch.setattr(first_start, "_gpus", lambda: ["Model: another"])
    assert is_first_start(EngineConfig()), "another kind of GPU"


def test_a_process_looks_at_the_sources_of_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    glob = Path.glob

    def noted(folder: Path, pattern: str) -> Iterator[Path]:
        folders.append(folder)
        return iter(glob(folder, pattern))

    monkeypatch.setattr(Path, "glob", noted)
    monkeypatch.setattr(first_start, "_gpus", list)
    first_start._newest_kernel.cache_clear()
    config = with_settings("executor", device="cpu")
    begin_first_start(config)
    assert is_first_start(config)
    mark_started(config)
    assert not is_first_start(config)
    assert [folder.name for folder in folders] == [Path(name).name for name in first_start.KERNELS]


def test_marks_are_deleted_with_the_kernels(cache: Path) -> None:
    mark_started(EngineConfig())
    assert [path.parent.parent for path in cache.rglob("*") if path.is_file()] == [cache]


def test_without_a_writable_cache_each_start_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    mark_started(EngineConfig())
    assert is_first_start(EngineConfig())


def test_the_cache_is_where_triton_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    assert first_start._triton_cache() == Path(triton.knobs.cache.dir)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert first_start._triton_cache() == Path(triton.knobs.cache.dir)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert first_start._triton_cache() == Path(triton.knobs.cache.dir)


def test_kinds_of_gpus_are_those_that_the_driver_lets_one_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 5\n")
    (tmp_path / "0000:02:00.0" / "information").mkdir()  # reading it raises OSError
    monkeypatch.setattr(first_start, "DRIVER", tmp_path)
    assert first_start._gpus() == ["Model: \t NVIDIA H200"]


def test_no_server_starts_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_has_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(first_start, "find_spec", lambda name: None)
    monkeypatch.setattr(SHARED, "begin", lambda: pytest.fail("a server was started"))
    begin_first_start(EngineConfig())


@pytest.mark.parametrize(
    ("config", "visible", "gpu", "begun"),
    [
        (EngineConfig(), None, True, True),
        (EngineConfig(), None, False, False),
        (EngineConfig(), "", True, False),
        (EngineConfig(), "-1", True, False),
        (EngineConfig(), "0", True, True),
        (with_settings("executor", device="cpu"), None, True, False),
        (with_settings("executor", kernels="plain"), None, True, False),
        (with_settings("executor", device="cuda:1"), None, True, True),
    ],
)
def test_the_server_starts_early_for_a_gpu_only(
    config: EngineConfig, visible: str | None, gpu: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(first_start, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(SHARED, "begin", lambda: calls.append(1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    begin_first_start(config)
    assert bool(calls) == begun
    mark_started(config)
    calls.clear()
    begin_first_start(config)
    assert not calls
