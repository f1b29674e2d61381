from __future__ import annotations

import inspect

import attrs
import pytest

from engine.core import hooks
from engine.core.config.tree import EngineConfig
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint

each_seam = pytest.mark.parametrize("seam", EXTENSION_POINTS, ids=lambda seam: seam.name)


@each_seam
def test_a_seam_has_a_hook_a_section_and_an_abstract_contract(seam: ExtensionPoint) -> None:
    assert list(inspect.signature(getattr(hooks, seam.hook)).parameters) == ["register"]
    section = getattr(EngineConfig(), seam.section)
    assert {"name", "options"} <= {one.name for one in attrs.fields(type(section))}
    assert inspect.isabstract(seam.contract)
    assert seam.api


def test_every_section_with_a_name_belongs_to_a_seam() -> None:
    named = {one.name for one in attrs.fields(EngineConfig) if hasattr(one.default, "options")}
    assert named == {seam.section for seam in EXTENSION_POINTS}
