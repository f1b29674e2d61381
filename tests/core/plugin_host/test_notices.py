"""Whenever auto takes a third party's plugin, the engine says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.types import SamplingParams

MODEL = """
from engine.core.hooks import hookimpl

@hookimpl
def register_models(register):
    register("rare", load, api="1", summary="", preference=99)

def load():
    from engine.plugins.models.llama import Llama

    class Rare(Llama):
        @classmethod
        def refuses(cls, config):
            return None

    return Rare
"""


@pytest.fixture
def rare(install: Any) -> None:
    """The distribution engine-rare 0.4, whose model class takes any checkpoint."""
    install("engine-rare", "0.4", MODEL, entry="rare")


def notices(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if "auto" in one.getMessage()]


@pytest.fixture
def build(engine_checkpoint: Any) -> Iterator[Callable[..., Engine]]:
    """Makes an engine that loads the plugins that are installed, and closes it after the test."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        fixed = {"cache__memory": "8MiB", "executor__device": "cpu", "model__dtype": "float32"}
        engines.append(Engine(str(engine_checkpoint), **{**fixed, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.usefixtures("rare")
def test_engine_says_that_auto_took_a_third_party_s_plugin(build: Any, caplog: Any) -> None:
    assert build(plugins__prefer=("engine-rare",)).generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids
    [notice] = notices(caplog)
    assert notice.startswith(
        "auto took model 'rare' of engine-rare 0.4, which is not built in; name it as model.name to have it without"
        " this notice, or deny it in [plugins] (auto: the most preferred"
    )


@pytest.mark.usefixtures("rare")
@pytest.mark.parametrize("settings", [{}, {"model__name": "rare"}, {"plugins__deny": ("rare",)}], ids=str)
def test_engine_says_nothing_where_auto_took_built_ins_or_the_plugin_was_named(
    build: Any, caplog: Any, settings: dict[str, Any]
) -> None:
    [model] = [one for one in build(**settings).parts.choices if one.extension_point == "models"]
    assert model.name == ("rare" if "model__name" in settings else "llama")
    assert not notices(caplog)
