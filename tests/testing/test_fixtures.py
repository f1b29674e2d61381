"""The fixtures that plugin authors get."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from engine.core.hooks import hookimpl


def test_the_plugin_of_pytest_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.testing.fixtures; "
        "print([name for name in ('torch', 'transformers', 'engine.core.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_engine_plugins_are_the_installed_ones(engine_plugins: Any) -> None:
    assert engine_plugins.attention.names()


def test_make_engine_knows_the_plugins_it_is_given(make_engine: Any) -> None:
    started = []

    class Listener:
        @hookimpl
        def engine_started(self, engine: Any) -> None:
            started.append(engine)

    engine = make_engine(Listener(), scheduler__max_running=3)
    assert started == [engine]
    assert engine.config.scheduler.max_running == 3
    assert len(engine.generate("ab", None)[0].token_ids) > 0
