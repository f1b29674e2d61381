from __future__ import annotations

import inspect

import attrs
import pytest

from engine.core import hooks
from engine.core.config.tree import EngineConfig
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint

each_point = pytest.mark.parametrize("point", EXTENSION_POINTS, ids=lambda point: point.name)


@each_point
def test_an_extension_point_has_a_hook_a_section_and_an_abstract_contract(point: ExtensionPoint) -> None:
    assert list(inspect.signature(getattr(hooks, point.hook)).parameters) == ["register"]
    section = getattr(EngineConfig(), point.section)
    assert {"name", "options"} <= {one.name for one in attrs.fields(type(section))}
    assert inspect.isabstract(point.contract)
    assert point.api


def test_every_section_with_a_name_belongs_to_an_extension_point() -> None:
    named = {one.name for one in attrs.fields(EngineConfig) if hasattr(one.default, "options")}
    assert named == {point.section for point in EXTENSION_POINTS}
