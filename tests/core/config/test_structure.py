"""A plugin's own options: its attrs class, filled without any silent conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal

import pytest
from attrs import field, frozen, validators

from engine.core.config.structure import structure_options
from engine.core.errors import ConfigError


class Color(Enum):
    RED = "red"


@frozen
class Inner:
    depth: int = 1


@frozen
class Outer:
    width: int = field(validator=validators.ge(1))


@frozen(kw_only=True)
class Options:
    needed: str
    count: int = field(default=1, validator=validators.ge(1))
    ratio: float = 0.5
    on: bool = False
    kind: Literal["a", "b"] = "a"
    maybe: int | None = None
    either: int | str = 0
    shape: Inner | Outer | tuple[int, ...] = Inner()
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    many: list[Inner] = field(factory=list)
    order: Sequence[int] = ()
    inner: Inner = Inner()
    table: Mapping[str, int] = {}
    code: str = field(default="ab", validator=validators.matches_re("[ab]+"))
    tide: str = field(default="high", validator=validators.in_(("high", "low")))
    color: Color = Color.RED
    anything: Any = None


def structured(**values: object) -> Options:
    found: Options = structure_options({"needed": "x", **values}, Options, "mine.options")
    return found


def test_keys_that_are_not_given_keep_their_defaults() -> None:
    assert structured() == Options(needed="x")


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("ratio", 2, 2.0),
        ("maybe", 3, 3),
        ("maybe", None, None),
        ("either", "s", "s"),
        ("either", 4, 4),
        ("shape", {"depth": 2}, Inner(2)),
        ("shape", {"width": 2}, Outer(2)),
        ("shape", [1, 2], (1, 2)),
        ("names", ["a", "b"], ("a", "b")),
        ("pair", [1, 2], (1, 2.0)),
        ("many", [{"depth": 2}, {}], [Inner(2), Inner(1)]),
        ("order", [1, 2], (1, 2)),
        ("inner", {"depth": 5}, Inner(5)),
        ("table", {"a": 1}, {"a": 1}),
        ("color", "red", Color.RED),
        ("kind", "b", "b"),
        ("anything", {"a": [1]}, {"a": [1]}),
    ],
)
def test_values_of_the_right_type_are_taken(name: str, given: object, value: object) -> None:
    found = getattr(structured(**{name: given}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, r"mine.options: there is no option 'cuont'; did you mean count\?"),
        ({"count": "1"}, r'mine.options.count: expected a whole number, found "1" \(a string\)'),
        ({"count": True}, "expected a whole number, found true"),
        ({"count": 0}, "mine.options: .*count"),
        ({"ratio": float("inf")}, "expected a number, found inf"),
        ({"on": 1}, "expected true or false, found 1"),
        ({"needed": 1}, "mine.options.needed: expected a string"),
        ({"kind": "c"}, "mine.options.kind"),
        ({"maybe": "3"}, "mine.options.maybe: expected a whole number"),
        ({"either": 1.5}, "expected a whole number or a string, found 1.5"),
        ({"shape": {"depth": "x"}}, r"shape: expected Inner or Outer or a list, found a table; not Inner, since mine"),
        (
            {"shape": {"depth": "x"}},
            r"since mine.options.shape.depth: expected a whole number.*; not Outer, since",
        ),
        ({"shape": {"width": 0}}, r"not Outer, since mine.options.shape: 'width' must be >= 1: 0$"),
        ({"shape": [1, "x"]}, r"; not a list, since mine.options.shape\[1\]: expected a whole number"),
        ({"shape": "s"}, r'shape: expected Inner or Outer or a list, found "s" \(a string\)$'),
        ({"names": "ab"}, r'expected a list, written \[a, b\], found "ab"'),
        ({"names": ["a", 1]}, r"mine.options.names\[1\]: expected a string, found 1"),
        ({"pair": [1]}, "expected a list of 2"),
        ({"inner": 3}, "mine.options.inner: expected a table, found 3"),
        ({"inner": {"depth": "x"}}, "mine.options.inner.depth: expected a whole number"),
        ({"many": [{"deep": 1}]}, r"mine.options.many\[0\]: there is no option 'deep'; did you mean depth"),
        ({"table": {"a": "x"}}, "mine.options.table"),
        ({"color": "blue"}, "mine.options.color"),
        ({"tide": "ebb"}, r"^mine\.options: 'tide' must be in \('high', 'low'\) \(got 'ebb'\)$"),
        ({"code": "xyz"}, r"^mine\.options: 'code' must match regex '\[ab\]\+' \('xyz' doesn't\)$"),
    ],
)
def test_anything_else_is_refused_with_its_place(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structured(**values)


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        structure_options({"count": "x", "on": 2, "cuont": 1}, Options, "mine.options")
    assert len(str(caught.value).splitlines()) == 4
    assert "mine.options.needed: this option has no default; give it" in str(caught.value)


def test_a_plugin_without_options_takes_none() -> None:
    assert structure_options({}, None, "mine.options") is None
    with pytest.raises(ConfigError, match=r"mine\.options has no options, but a was given"):
        structure_options({"a": 1}, None, "mine.options")
