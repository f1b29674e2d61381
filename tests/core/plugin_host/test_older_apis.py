"""Plugins that are written for version "1" of a contract of which core has version "2"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.load import load_plugins
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.models.llama import Llama
from engine.plugins.quant.none import Unquantized

from .faulty import offering


class Attention(TorchAttention):
    api = "1"

    def __init__(self, spec: Any, pool: Any, options: Any) -> None:
        assert spec.page_size == 32
        super().__init__(spec, pool, options)


OLDER = {
    "attention": Attention,
    "quant": type("Quant", (Unquantized,), {"api": "1"}),
    "model": type("Model", (Llama,), {"api": "1"}),
}
"""By section. Executors and speculators of version "1" have tests of their own."""


def test_older_versions_are_tested_here_or_with_their_extension_point() -> None:
    assert {point.section for point in EXTENSION_POINTS if point.older_apis} == {*OLDER, "executor", "speculator"}


@pytest.mark.parametrize("section", OLDER)
def test_plugin_of_an_older_version_computes_the_same(section: str, engine_checkpoint: Path) -> None:
    settings: dict[str, Any] = {"cache__memory": "8MiB", "cache__block_size": 32, "executor__device": "cpu"}
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with Engine(str(engine_checkpoint), **settings, attention__name="torch") as engine:
        expected = engine.generate([[1, 2, 3]], params)[0].token_ids
    settings = {"attention__name": "torch", **settings, f"{section}__name": "mine"}
    plugins = load_plugins(extra=[offering(section, OLDER[section])])
    with Engine(str(engine_checkpoint), plugins=plugins, **settings) as engine:
        assert "mine" in [choice.name for choice in engine.parts.choices]
        assert engine.generate([[1, 2, 3]], params)[0].token_ids == expected
