"""Registries: the implementations that plugins have registered, by name and in the order that auto considers them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from attrs import frozen

from engine.core.attention.base import AttentionBackend
from engine.core.config.tree import PluginsConfig
from engine.core.errors import ConfigError, PluginError
from engine.core.hooks import hookimpl, lazy
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.load import load_plugins

OFFER = """
from engine.core.hooks import hookimpl

@hookimpl
def register_schedulers(register):
    register("{name}", load, api="1", summary="", preference=99)

def load():
    from engine.plugins.schedulers.fcfs import FirstComeFirstServed
    return type("{name}", (FirstComeFirstServed,), {{}})
"""


class Incomplete(AttentionBackend):
    api = "1"

    def plan(self, batch: Any, graph: Any = None) -> Any:
        return None


class Complete(Incomplete):
    def __init__(self, spec: Any, pool: Any, options: Any) -> None: ...

    def forward(self, layer: Any, q: Any, k: Any, v: Any, plan: Any) -> Any:
        return q

    @classmethod
    def refuses(cls, spec: Any, device: Any) -> Any:
        return None


Install = Callable[..., None]


def test_an_unknown_name_lists_the_known_ones_and_near_misses(install: Install) -> None:
    install("engine-mine", "1", OFFER.format(name="shortest"), entry="mine")
    with pytest.raises(PluginError, match=r"no scheduler plugin 'shotest'; did you mean shortest\?.*known:.*fcfs"):
        load_plugins().schedulers.get("shotest")


def test_processes_compare_what_they_have_loaded(install: Install) -> None:
    bare = load_plugins()
    bare.verify(load_plugins().manifest())
    bare.verify([list(entry) for entry in bare.manifest()])
    install("engine-mine", "1", OFFER.format(name="mine"), entry="mine")
    more = load_plugins()
    with pytest.raises(PluginError, match="lacks mine engine-mine 1;"):
        bare.verify(more.manifest())
    with pytest.raises(PluginError, match="has in addition mine engine-mine 1;"):
        more.verify(bare.manifest())
    with pytest.raises(PluginError, match="another order"):
        more.verify(tuple(reversed(more.manifest())))


class Offer:
    """A plugin that offers one class."""

    def __init__(self, loader: Callable[[], object]) -> None:
        self.loader = loader

    @hookimpl
    def register_attention(self, register: Any) -> None:
        register("offered", self.loader, api="1", summary="")


class Outdated(Complete):
    api = "0"


class NoVersion(Complete):
    api = None


class NumberedVersion(Complete):
    api = 2


class Dictionary(Complete):
    options_class = dict


@frozen
class Options:
    number: int = 1


class MadeOptions(Complete):
    options_class = Options()


class OtherLayout(Complete):
    kv_layout = "HND"


class MisspeltGraphs(Complete):
    graphs = "decodes"


class OnePageSize(Complete):
    block_sizes = 16


class NoPageSize(Complete):
    block_sizes = ()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: Incomplete, "lacks __init__, forward, refuses of engine.core.attention.AttentionBackend"),
        (lambda: Outdated, r"api = '0', but this engine has version '2' \(and accepts '1'\)"),
        (
            lambda: NoVersion,
            "is NoVersion without api; put api = '2' into the class, the version of .*AttentionBackend",
        ),
        (lambda: NumberedVersion, "is NumberedVersion with api = 2; put api = '2' into the class, .* as text"),
        (lambda: Dictionary, "is not an attrs class"),
        (lambda: MadeOptions, "is not an attrs class"),
        (lambda: OtherLayout, "kv_layout = 'HND', but the KV cache is laid out as NHD only"),
        (lambda: MisspeltGraphs, "graphs = 'decodes'; it must be one of none, decode, any"),
        (lambda: OnePageSize, "block_sizes = 16; it must be a tuple of numbers"),
        (lambda: NoPageSize, "must be a tuple of numbers"),
        (lambda: sys.exit(3), r"could not be imported: SystemExit: 3 \(.*test_registry\.py, line \d+\)$"),
        (lambda: dict, "not a subclass of engine.core.attention.AttentionBackend"),
        (lambda: 3, "not a subclass"),
        (lazy("no_such_module:Thing"), "could not be imported: ModuleNotFoundError: No module named 'no_such_module'$"),
        (lazy("math:pi"), "could not be imported: TypeError"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(loader: Callable[[], object], message: str) -> None:
    registration = load_plugins(extra=[Offer(loader)]).attention.get("offered")
    with pytest.raises(PluginError, match=message):
        registration.load()


def test_a_hook_reaches_every_plugin() -> None:
    seen = []

    class Listener:
        @hookimpl
        def engine_started(self, engine: Any) -> None:
            seen.append(("started", engine))

        @hookimpl
        def engine_stopped(self, engine: Any) -> None:
            seen.append(("stopped", engine))

        @hookimpl
        def register_commands(self, app: Any) -> None:
            seen.append(("commands", app))

    hook = load_plugins(extra=[Listener()]).hook
    hook.register_commands(app=1)
    hook.engine_started(engine=2)
    hook.engine_stopped(engine=3)
    assert seen == [("commands", 1), ("started", 2), ("stopped", 3)]


@pytest.mark.parametrize("point", EXTENSION_POINTS, ids=lambda point: point.name)
def test_every_builtin_class_keeps_its_contract(point: Any) -> None:
    for registration in load_plugins().registries[point.name]:
        assert issubclass(registration.load(), point.contracts)


@pytest.fixture
def eager(install: Any) -> None:
    """The distribution Engine_Eager 0.4, whose scheduling policy prefers itself to every other."""
    install("Engine_Eager", "0.4", OFFER.format(name="eager"), entry="eager-entry")


def candidates(**config: Any) -> list[str]:
    """What auto considers of the scheduling policies, the most preferred first."""
    return [one.name for one in load_plugins(PluginsConfig(**config)).schedulers.candidates()]


@pytest.mark.usefixtures("eager")
def test_a_third_party_s_preference_counts_only_after_all_built_ins() -> None:
    assert candidates() == ["fcfs", "eager"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["Engine_Eager", "engine-eager", "ENGINE.eager"])
def test_a_third_party_s_preference_counts_when_the_configuration_names_its_distribution(name: str) -> None:
    assert candidates(prefer=(name,)) == ["eager", "fcfs"]


def test_prefer_refuses_a_distribution_without_plugins() -> None:
    with pytest.raises(ConfigError, match=r"\[plugins\] prefer names 'nowhere', but no installed .*; known: "):
        load_plugins(PluginsConfig(prefer=("nowhere",)))


def test_what_is_passed_in_from_python_counts_as_named() -> None:
    class Mine:
        @hookimpl
        def register_schedulers(self, register: Any) -> None:
            register("mine", lambda: None, api="1", summary="", preference=99)

    assert [one.name for one in load_plugins(extra=[Mine()]).schedulers.candidates()] == ["mine", "fcfs"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (
            {"deny": ("eager-entry",)},
            "eager-entry",
            "of Engine_Eager 0.4 is denied: take 'eager-entry' out",
        ),
        ({"deny": ("eager-entry",)}, "eager", "not asked: plugin 'eager-entry' of Engine_Eager 0.4$"),
        ({"allow": ("builtin",)}, "eager-entry", "is not allowed: add 'eager-entry' to"),
    ],
)
def test_to_select_what_is_denied_says_so(config: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"^there is no scheduler plugin '{name}'.*{message}"):
        load_plugins(PluginsConfig(**config)).schedulers.get(name)
