"""A plugin's own options: its attrs class, filled without any silent conversion."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import field, frozen, validators

from engine.core.config.structure import structure_options
from engine.core.config.tree import OptionPlace
from engine.core.errors import ConfigError


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 7


class Shade(StrEnum):
    DARK = "dark"

    @classmethod
    def _missing_(cls, value: object) -> Shade | None:
        return cls.DARK if value == "Dark" else None


class Access(Flag):
    READ = 1
    WRITE = 2


class Scale(Enum):
    WHOLE = 1.0


@dataclass
class Plain:
    depth: int = 1


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
    level: Level = Level.LOW
    shade: Shade = Shade.DARK
    access: Access = Access.READ
    scale: Scale = Scale.WHOLE
    plain: Plain = Plain()  # noqa: RUF009
    unique: set[str] = field(factory=set)
    frozen: Set[int] = frozenset()
    bare: list = field(factory=list)  # type: ignore[type-arg]
    tables: dict[str, Inner] = field(factory=dict)
    path: Path = Path("default")
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
        ("color", Color.BLUE, Color.BLUE),
        ("level", 7, Level.HIGH),
        ("level", Level.HIGH, Level.HIGH),
        ("shade", Shade.DARK, Shade.DARK),
        ("shade", "Dark", Shade.DARK),
        ("access", 3, Access.READ | Access.WRITE),
        ("access", Access.READ | Access.WRITE, Access.READ | Access.WRITE),
        ("scale", 1, Scale.WHOLE),
        ("plain", {"depth": 2}, Plain(2)),
        ("unique", ["a", "a"], {"a"}),
        ("frozen", [1], frozenset({1})),
        ("bare", [1, "a"], [1, "a"]),
        ("tables", {"a": {"depth": 2}}, {"a": Inner(2)}),
        ("path", "/a", Path("/a")),
        ("path", "", Path()),
        ("path", Path("a"), Path("a")),
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
        ({"table": {"a": "x"}}, "mine.options.table.a: expected a whole number, found "),
        ({"table": 3}, r"mine.options.table: expected a table, found 3 \(a whole number\)"),
        ({"tables": {"a": {"deep": 2}}}, "mine.options.tables.a: there is no option 'deep'"),
        ({"color": "BLUE"}, r'^mine\.options\.color: "BLUE" is no choice; known: red, blue$'),
        ({"color": "bleu"}, r'color: "bleu" is no choice; did you mean blue\? known: red, blue$'),
        ({"level": 2}, r"level: 2 is no choice; known: 1, 7$"),
        ({"level": True}, r"level: true is no choice; known: 1, 7$"),
        ({"scale": True}, r"scale: true is no choice; known: 1\.0$"),
        ({"access": 8}, r"access: 8 is no choice; known: 1, 2$"),
        ({"color": Level.LOW}, r"color: 1 is no choice; known: red, blue$"),
        ({"kind": "c"}, r'kind: "c" is no choice; known: a, b$'),
        ({"plain": {"deep": 2}}, r"mine.options.plain: there is no option 'deep'; did you mean depth\?"),
        ({"unique": "ab"}, r'unique: expected a list, written \[a, b\], found "ab"'),
        ({"bare": "ab"}, r'bare: expected a list, written \[a, b\], found "ab"'),
        ({"path": 3}, r"path: expected a path, which is a string, found 3"),
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


@frozen
class Places:
    path: Path = Path("default")
    many: list[Path] = field(factory=list)
    pair: tuple[int, Path] = (0, Path())
    table: dict[str, Path] = field(factory=dict)
    maybe: Path | None = None
    either: int | Path = 0
    inner: Places | None = None
    text: str = ""


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("path", "a/b", Path("/files/a/b")),
        ("path", "/a", Path("/a")),
        ("path", "~/a", Path("/home/me/a")),
        ("many", ["a", "~"], [Path("/files/a"), Path("/home/me")]),
        ("pair", [1, "a"], (1, Path("/files/a"))),
        ("table", {"x": "a"}, {"x": Path("/files/a")}),
        ("maybe", "a", Path("/files/a")),
        ("either", "a", Path("/files/a")),
        ("inner", {"inner": {"path": "a"}}, Places(inner=Places(path=Path("/files/a")))),
        ("text", "~/a", "~/a"),
    ],
)
def test_paths_start_from_the_directory_of_their_file_when_an_option_is_declared_as_a_path(
    name: str, given: Any, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    places = {(name,): OptionPlace("engine.toml", "/files"), ("of", "others"): OptionPlace("--set")}
    assert structure_options({name: given}, Places, "mine.options", places) == Places(**{name: value})


def test_paths_of_one_table_start_from_different_directories_when_only_one_is_in_a_file() -> None:
    places = {("inner", "path"): OptionPlace("a.toml", "/files"), ("inner", "many"): OptionPlace("--set")}
    found = structure_options({"inner": {"path": "x", "many": ["y"]}}, Places, "mine.options", places)
    assert found.inner == Places(path=Path("/files/x"), many=[Path("y")])


def test_errors_name_where_each_option_was_given() -> None:
    file, flag = OptionPlace("a.toml", "/files"), OptionPlace("--mine-option")
    places = {("count",): file, ("inner", "deep"): flag, ("inner", "depth"): file, ("cuont",): flag}
    with pytest.raises(ConfigError) as caught:
        structure_options({"count": "x", "inner": {"deep": 1, "depth": 2}, "cuont": 1}, Options, "mine.options", places)
    assert str(caught.value).splitlines() == [
        "mine.options.needed: this option has no default; give it",
        'a.toml: mine.options.count: expected a whole number, found "x" (a string)',
        "--mine-option: mine.options.inner: there is no option 'deep'; did you mean depth? known: depth",
        *[line for line in str(caught.value).splitlines() if line.startswith("--mine-option: mine.options: ")],
    ]
    with pytest.raises(ConfigError, match=r"^a\.toml and --set: mine\.options: 'width' must be >= 1: 0$"):
        structure_options({"width": 0}, Outer, "mine.options", {("width",): file, ("x",): OptionPlace("--set")})
    with pytest.raises(ConfigError, match=r"^a\.toml: mine\.options has no options, but a was given"):
        structure_options({"a": 1}, None, "mine.options", {("a",): file})


@pytest.mark.parametrize("kind", [datetime.timedelta, list[datetime.timedelta], bytes, complex, Options | complex])
def test_error_names_the_option_and_its_class_when_nothing_can_be_converted_to_its_type(kind: Any) -> None:
    cls = attrs.make_class("Mine", {"count": attrs.field(type=int), "wait": attrs.field(type=kind, default=None)})
    assert structure_options({"count": 1}, cls, "mine.options").count == 1
    with pytest.raises(ConfigError, match=r"^mine\.options\.wait.*no setting can be converted to \w+") as caught:
        structure_options({"wait": [3], "count": 1}, cls, "mine.options")
    assert "hook" not in str(caught.value)


def test_error_lists_the_types_that_work_when_an_option_has_another() -> None:
    cls = attrs.make_class("Mine", {"wait": attrs.field(type=datetime.timedelta)})
    with pytest.raises(ConfigError, match=r"to timedelta, which Mine of the plugin declares; types that work are bool"):
        structure_options({"wait": 3}, cls, "mine.options")
