"""Pytest fixtures for plugin authors. Pytest finds them by entry point, so importing this module must be cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.plugin_host import Plugins

for _suite in (
    "attention",
    "executors",
    "grammars",
    "leftovers",
    "models",
    "quant",
    "schedulers",
    "speculators",
    "stored_layers",
):
    pytest.register_assert_rewrite(f"engine.testing.{_suite}")


@pytest.fixture(scope="session")
def engine_plugins() -> Plugins:
    """All installed plugins."""
    from engine.core.plugin_host import load_plugins

    return load_plugins()


@pytest.fixture(scope="session")
def engine_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama checkpoint with a tokenizer."""
    from engine.testing.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", tokenizer=True)


@pytest.fixture
def make_engine(engine_checkpoint: Path) -> Iterator[Callable[..., Engine]]:
    """`make_engine(*plugins, **settings)`: an Engine over the tiny checkpoint with these plugin objects loaded too.

    Unless `settings` say otherwise, the engine has a small KV cache and computes in float32 on the CPU. It is closed
    after the test.
    """
    from engine.core.engine import Engine
    from engine.core.plugin_host import load_plugins

    engines: list[Engine] = []

    def make(*plugins: object, model: str | None = None, **settings: Any) -> Engine:
        defaults = {"cache__memory": "8MiB", "executor__device": "cpu", "model__dtype": "float32"}
        engine = Engine(
            model or str(engine_checkpoint), plugins=load_plugins(extra=plugins), **{**defaults, **settings}
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
