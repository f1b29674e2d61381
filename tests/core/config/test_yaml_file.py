"""Files of settings in YAML: what is read, and what is refused as a ConfigError."""

from __future__ import annotations

import pytest

from engine.core.config.yaml_file import load_yaml
from engine.core.errors import ConfigError

MERGED_LATE = """
defaults: &defaults {size: 1}
top:
  inner: &inner {<<: *defaults, size: 2}
other: {<<: *inner, name: 3}
"""
"""A merge that PyYAML resolves before it constructs the mapping `inner`."""


def test_merged_mappings_are_read_whatever_the_order_in_which_they_are_constructed() -> None:
    found = load_yaml(MERGED_LATE, "engine.yml")
    assert found["top"] == {"inner": {"size": 2}}
    assert found["other"] == {"size": 2, "name": 3}


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: {b: {c: 1, c: 2}}", "a: &a {b: 1}\nc: {<<: *a, d: 1, d: 2}"])
def test_a_duplicate_key_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.yml is not valid YAML: '[acd]' is given twice\n.*line \d"):
        load_yaml(text, "engine.yml")


@pytest.mark.parametrize(
    "text",
    ["a: 2001-99-99", "a: 0x_", "a: !!int b", "a: !!timestamp b", "a: !!bool b", "[" * 5000],
    ids=["date", "number", "tagged number", "tagged date", "tagged boolean", "depth"],
)
def test_a_value_that_cannot_be_constructed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.yml is not valid YAML: \w+"):
        load_yaml(text, "engine.yml")


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: {c: *x}}", "&x\na: *x"], ids=["list", "mapping", "file"])
def test_an_alias_within_the_value_that_it_repeats_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.yml is not valid YAML: the alias \*x is within the value"):
        load_yaml(text, "engine.yml")


def test_an_alias_behind_its_value_is_read() -> None:
    assert load_yaml("a: &x {b: &y [1]}\nc: *x\nd: *y", "engine.yml") == {"a": {"b": [1]}, "c": {"b": [1]}, "d": [1]}
