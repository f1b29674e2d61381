"""A guarded class is the plugin's own, with start-up calls that name the plugin in errors and nothing else changed."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod

import pytest
from attrs import frozen

from engine.core.errors import ConfigError, PluginFaultError
from engine.core.plugin_host.extension_points import EXTENSION_POINTS, ExtensionPoint
from engine.core.plugin_host.guard import STARTUP_CALLS, StartupCall, guarded, owner_of

OWNER = "attention 'mine' of mine 1.0"
CALLS = tuple(map(StartupCall, ("__init__", "refuses", "shape", "ready", "fixed", "load", "absent")))


class Plugin(ABC):  # noqa: B024  (as every contract is)
    """A plugin's class."""

    fixed = 3

    def __init__(self, depth: int) -> None:
        self.depth = 6 // depth

    @classmethod
    def refuses(cls, answers: dict[str, str]) -> str:
        return f"{cls.__name__} {answers['why']}"

    @staticmethod
    def shape(sizes: list[int]) -> int:
        return sizes[0]

    @property
    def ready(self) -> bool:
        return bool(6 / self.depth)

    def load(self, sizes: list[int]) -> int:
        return self.depth + sizes[0]

    def forward(self, sizes: list[int]) -> int:
        return sizes[0]


@pytest.fixture
def plugin() -> type[Plugin]:
    return guarded(Plugin, OWNER, CALLS)


def test_a_guarded_class_answers_as_the_plugin_does(plugin: type[Plugin]) -> None:
    made = plugin(2)
    assert isinstance(made, Plugin)
    assert (made.depth, made.load([1]), made.ready, plugin.shape([7]), made.shape([7])) == (3, 4, True, 7, 7)
    assert plugin.refuses({"why": "no"}) == made.refuses({"why": "no"}) == "Plugin no"
    assert (plugin.__name__, plugin.__qualname__, plugin.__module__) == ("Plugin", "Plugin", __name__)
    assert plugin.__wrapped__ is Plugin
    assert (owner_of(plugin), owner_of(Plugin)) == (OWNER, "Plugin")


def test_every_kind_of_call_names_plugin_and_call(plugin: type[Plugin]) -> None:
    made = plugin(2)
    made.depth = 0
    for fail, call in (
        (lambda: plugin(0), "its constructor"),
        (lambda: plugin.refuses({}), r"refuses\(\)"),
        (lambda: made.refuses({}), r"refuses\(\)"),
        (lambda: plugin.shape([]), r"shape\(\)"),
        (lambda: made.ready, "ready"),
        (lambda: made.load([]), r"load\(\)"),
    ):
        with pytest.raises(PluginFaultError, match=f"^{OWNER} failed in {call}: "):
            fail()


def test_only_start_up_calls_are_wrapped(plugin: type[Plugin]) -> None:
    assert plugin.forward is Plugin.forward
    assert "fixed" not in vars(plugin)
    assert "absent" not in vars(plugin)
    with pytest.raises(IndexError):
        plugin(2).forward([])


def test_a_class_with_slots_stays_without_a_dictionary() -> None:
    @frozen
    class Slotted:
        depth: int = 1

    assert not hasattr(guarded(Slotted, OWNER, CALLS)(), "__dict__")


def test_an_error_raised_on_purpose_passes() -> None:
    class Fussy(Plugin):
        @classmethod
        def refuses(cls, answers: dict[str, str]) -> str:
            raise ConfigError("give it a tide")

    with pytest.raises(ConfigError, match=r"^give it a tide$"):
        guarded(Fussy, OWNER, CALLS).refuses({})


def test_an_abstract_member_stays_abstract() -> None:
    class Unfinished(Plugin):
        @abstractmethod
        def load(self, sizes: list[int]) -> int: ...

    assert inspect.isabstract(guarded(Unfinished, OWNER, CALLS))


@pytest.mark.parametrize("point", EXTENSION_POINTS, ids=lambda point: point.name)
def test_every_start_up_call_is_part_of_the_contract(point: ExtensionPoint) -> None:
    for call in STARTUP_CALLS[point.name]:
        assert any(hasattr(contract, call.name) for contract in point.contracts)
