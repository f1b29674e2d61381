"""The plugin host against packages made on the spot: whole, broken, misspelt, duplicate and outdated ones."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from engine.core.attention.base import AttentionBackend
from engine.core.config.tree import PluginsConfig
from engine.core.errors import ConfigError, PluginError
from engine.core.hooks import hookimpl, lazy
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.registry import load_plugins

POLICY = """
from engine.core.hooks import hookimpl
from engine.core.schedulers.policy import SchedulingPolicy

class Policy(SchedulingPolicy):
    api = "1"

    def order(self, waiting, now):
        return waiting

    def victim(self, running):
        return running[-1]

@hookimpl
def register_schedulers(register):
    register("{name}", lambda: Policy, api="1", summary="for a test")
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


def test_builtins_come_first_and_fill_every_extension_point() -> None:
    plugins = load_plugins()
    assert all(registry.names() for registry in plugins.registries.values())
    assert {info.distribution for info in plugins.loaded} >= {"pluggable-llm-engine"}
    assert plugins.loaded[0].name.startswith("builtin:")
    assert not [failure for failure in plugins.failures if failure.plugin.distribution == "pluggable-llm-engine"]


def test_loading_imports_no_torch() -> None:
    code = "import sys; from engine.core.plugin_host import load_plugins; load_plugins(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_third_party_plugin_is_registered_with_its_provenance(install: Install) -> None:
    install("engine-mine", "2.5", POLICY.format(name="mine"), entry="mine")
    plugins = load_plugins()
    found = plugins.schedulers.get("mine")
    assert (found.distribution, found.version, found.summary) == ("engine-mine", "2.5", "for a test")
    assert found.load().__name__ == "Policy"
    assert plugins.manifest()[-1] == ("mine", "engine-mine", "2.5")


def test_the_order_does_not_depend_on_the_order_of_installation(install: Install) -> None:
    install("engine-zz", "1", POLICY.format(name="zz"), entry="zz")
    install("engine-aa", "1", POLICY.format(name="aa"), entry="late")
    assert [info.name for info in load_plugins().loaded][-2:] == ["late", "zz"]


def test_a_broken_plugin_is_one_warning_and_the_others_load(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("engine-broken", "0.1", "import no_such_module_anywhere", entry="broken")
    install("engine-mine", "1", POLICY.format(name="mine"), entry="mine")
    with caplog.at_level(logging.WARNING):
        plugins = load_plugins()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "'broken' of engine-broken 0.1" in message
    assert "no_such_module_anywhere" in message
    assert plugins.schedulers.get("mine").load()


@pytest.mark.parametrize("selected", ["broken", "anything"])
def test_selecting_a_broken_plugin_raises_with_its_cause(install: Install, selected: str) -> None:
    install("engine-broken", "0.1", "import no_such_module_anywhere", entry="broken")
    with pytest.raises(PluginError, match=r"engine-broken 0\.1.*no_such_module_anywhere") as caught:
        load_plugins().schedulers.get(selected)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_that_fails_half_way_leaves_nothing_at_any_extension_point(install: Install) -> None:
    source = POLICY.format(name="half") + (
        "\n@hookimpl\ndef register_models(register):\n"
        "    register('half-model', lambda: Policy, api='1', summary='x')\n    raise RuntimeError('half-way')\n"
        "\n@hookimpl\ndef engine_started(engine):\n    raise AssertionError('a failed plugin still has hooks')\n"
    )
    install("engine-half", "0.1", source, entry="half-entry")
    plugins = load_plugins()
    assert "half" not in plugins.schedulers.names()
    assert "half-model" not in plugins.models.names()
    assert "engine-half" not in [info.distribution for info in plugins.loaded]
    plugins.hook.engine_started(engine=None)
    for registry, name in ((plugins.schedulers, "half"), (plugins.models, "half-model")):
        with pytest.raises(PluginError, match="half-way") as caught:
            registry.get(name)
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt", "GeneratorExit"])
def test_what_a_plugin_raises_at_import_is_a_failure_of_that_plugin_only(install: Install, error: str) -> None:
    install("engine-exit", "0.1", f"raise {error}", entry="exit")
    assert [failure.plugin.name for failure in load_plugins().failures] == ["exit"]


def test_a_misspelt_hook_is_reported_with_plugin_and_hook(install: Install) -> None:
    source = POLICY.format(name="mine").replace("register_schedulers", "register_shedulers")
    install("engine-typo", "0.1", source, entry="typo")
    [failure] = load_plugins().failures
    assert "engine-typo 0.1" in str(failure)
    assert "'register_shedulers'" in str(failure)
    assert "register_schedulers" in str(failure)


def test_a_wrong_hook_argument_is_reported(install: Install) -> None:
    install("engine-arg", "0.1", POLICY.format(name="m").replace("(register)", "(registry)"), entry="arg")
    [failure] = load_plugins().failures
    assert "registry" in str(failure)


def test_a_module_without_hooks_is_reported(install: Install) -> None:
    install("engine-empty", "0.1", "x = 1", entry="empty")
    [failure] = load_plugins().failures
    assert "without hooks" in str(failure)


def test_two_plugins_of_one_name_are_refused_and_deny_resolves_it(install: Install) -> None:
    install("engine-first", "1.1", POLICY.format(name="same"), entry="first")
    install("engine-second", "2.2", POLICY.format(name="same"), entry="second")
    with pytest.raises(PluginError) as caught:
        load_plugins().schedulers.get("same")
    for part in ("engine-first 1.1", "'first'", "engine-second 2.2", "'second'", "deny"):
        assert part in str(caught.value)
    for denied, kept in (("first", "engine-second"), ("second", "engine-first")):
        plugins = load_plugins(PluginsConfig(deny=(denied,)))
        assert plugins.schedulers.get("same").distribution == kept
        assert not plugins.failures


def test_two_plugins_of_one_name_that_deny_cannot_tell_apart(install: Install) -> None:
    install("engine-first", "1.1", POLICY.format(name="same"), entry="one")
    install("engine-second", "2.2", POLICY.format(name="same"), entry="one")
    with pytest.raises(PluginError, match=r"two plugins offer scheduler 'same'.*; uninstall one of the distributions"):
        load_plugins().schedulers.get("same")


def test_a_name_of_a_builtin_cannot_be_taken_over(install: Install) -> None:
    name = load_plugins().schedulers.names()[0]
    install("engine-thief", "1", POLICY.format(name=name), entry="thief")
    plugins = load_plugins()
    assert [one.distribution for one in plugins.schedulers.candidates()] == ["pluggable-llm-engine"]
    with pytest.raises(
        PluginError, match=r"two plugins offer scheduler.*; give that of engine-thief another name, or put 'thief'"
    ):
        plugins.schedulers.get(name)


def test_another_contract_version_is_refused_with_both_versions(install: Install) -> None:
    install(
        "engine-old", "0.1", POLICY.format(name="old").replace('Policy, api="1"', 'Policy, api="0"'), entry="old-entry"
    )
    with pytest.raises(PluginError, match=r"version '0' of the schedulers contract.*version '1'"):
        load_plugins().schedulers.get("old")


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ({"preference": "high"}, "with the preference 'high'; give a whole number"),
        ({"preference": -1}, "with the preference -1; give a whole number"),
        ({"preference": True}, "with the preference True; give a whole number"),
        ({"summary": None}, "with the summary None; give one line of text"),
        ({"api": 1}, "with api = 1; give the version as text, as api='1'"),
        ({"loader": Complete}, r"Complete'>; give a function that returns the class, as `lambda: Class` or `lazy"),
        (
            {"loader": "module:Class"},
            "a loader that is not a function: 'module:Class'; give a function that returns the class",
        ),
    ],
)
def test_an_impossible_offer_is_refused(offer: dict[str, object], message: str) -> None:
    class Plugin:
        @hookimpl
        def register_schedulers(self, register: Any) -> None:
            register("mine", **{"loader": lambda: None, "api": "1", "summary": "", **offer})

    with pytest.raises(PluginError, match=message):
        load_plugins(extra=[Plugin()])


def test_a_hook_that_returns_in_place_of_registering_is_refused() -> None:
    class Returns:
        @hookimpl
        def register_attention(self, register: Any) -> Any:
            return [Complete]

    class Yields:
        @hookimpl
        def register_attention(self, register: Any) -> Iterator[Any]:
            yield register("mine", lambda: Complete, api="1", summary="")

    for plugin in (Returns(), Yields()):
        with pytest.raises(PluginError, match=r"from register_attention\(\), which ignores it; call register\("):
            load_plugins(extra=[plugin])


@pytest.mark.parametrize("path", ["engine.core", "engine.core.quant.base:", ":Thing", ""])
def test_a_lazy_path_without_a_class_is_refused_at_once(path: str) -> None:
    with pytest.raises(ValueError, match='write it as "module:Class"'):
        lazy(path)


@pytest.mark.parametrize("name", ["", "auto", "one,two", 3])
def test_an_impossible_name_is_refused(name: object) -> None:
    class Plugin:
        @hookimpl
        def register_quant(self, register: Any) -> None:
            register(name, lambda: object, api="1", summary="")

    with pytest.raises(PluginError, match="non-empty string"):
        load_plugins(extra=[Plugin()])


def test_an_unknown_name_lists_the_known_ones_and_near_misses(install: Install) -> None:
    install("engine-mine", "1", POLICY.format(name="shortest"), entry="mine")
    with pytest.raises(PluginError, match=r"no scheduler plugin 'shotest'; did you mean shortest\?.*known:.*fcfs"):
        load_plugins().schedulers.get("shotest")


def test_allow_and_deny(install: Install) -> None:
    install("engine-aa", "1", POLICY.format(name="aa"), entry="aa")
    install("engine-bb", "1", POLICY.format(name="bb"), entry="bb")
    assert {"aa", "bb"} <= set(load_plugins().schedulers.names())
    allowed = load_plugins(PluginsConfig(allow=("aa",))).schedulers.names()
    assert "aa" in allowed
    assert "bb" not in allowed
    assert "fcfs" in allowed
    denied = load_plugins(PluginsConfig(deny=("aa", "builtin")))
    assert denied.schedulers.names() == ("bb",)
    assert denied.attention.names() == ()


@pytest.mark.parametrize("key", ["allow", "deny"])
def test_a_list_that_names_no_entry_point_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[plugins\] {key} names 'biultin'.*did you mean builtin"):
        load_plugins(PluginsConfig(**{key: ("biultin",)}))


def test_a_denied_plugin_is_not_even_imported(install: Install) -> None:
    install("engine-broken", "0.1", "raise AssertionError('imported')", entry="broken")
    assert not load_plugins(PluginsConfig(deny=("broken",))).failures


def test_a_pack_loads_each_of_its_modules_by_itself(install: Install, tmp_path: Path) -> None:
    (tmp_path / "pack_good.py").write_text(POLICY.format(name="good"))
    (tmp_path / "pack_bad.py").write_text("raise ValueError('bad member')")
    source = 'PACK = ("pack_bad", "pack_good")'
    install("engine-pack", "3", source, entry="pack", target="engine_pack_module:PACK")
    plugins = load_plugins()
    assert plugins.schedulers.get("good").load()
    assert plugins.manifest()[-1] == ("pack:pack_good", "engine-pack", "3")
    [failure] = plugins.failures
    assert failure.plugin.name == "pack:pack_bad"


def test_two_modules_of_a_pack_that_offer_one_name_must_be_renamed(install: Install, tmp_path: Path) -> None:
    for module in ("pack_one", "pack_two"):
        (tmp_path / f"{module}.py").write_text(POLICY.format(name="same"))
    install("engine-pack", "3", 'PACK = ("pack_one", "pack_two")', entry="pack", target="engine_pack_module:PACK")
    with pytest.raises(PluginError, match=r"two plugins offer scheduler 'same'.*; give one of them another name"):
        load_plugins().schedulers.get("same")


def test_processes_compare_what_they_have_loaded(install: Install) -> None:
    bare = load_plugins()
    bare.verify(load_plugins().manifest())
    bare.verify([list(entry) for entry in bare.manifest()])
    install("engine-mine", "1", POLICY.format(name="mine"), entry="mine")
    more = load_plugins()
    with pytest.raises(PluginError, match="lacks mine engine-mine 1;"):
        bare.verify(more.manifest())
    with pytest.raises(PluginError, match="has in addition mine engine-mine 1;"):
        more.verify(bare.manifest())
    with pytest.raises(PluginError, match="another order"):
        more.verify(tuple(reversed(more.manifest())))


def test_extra_plugins_are_objects_or_modules_and_must_work() -> None:
    class Plugin:
        @hookimpl
        def register_schedulers(self, register: Any) -> None:
            register("extra", lazy("collections:Counter"), api="1", summary="")

    plugins = load_plugins(extra=[Plugin()])
    assert plugins.schedulers.get("extra").plugin.provenance == "object"


def test_one_plugin_that_offers_a_name_twice_is_refused(install: Install) -> None:
    source = POLICY.format(name="twin") + '    register("twin", lambda: Policy, api="1", summary="again")\n'
    install("engine-twin", "1", source, entry="twins")
    with pytest.raises(PluginError, match=r"engine-twin 1 offers scheduler 'twin' twice"):
        load_plugins().schedulers.get("twin")


def test_two_extra_plugins_of_one_class_are_two_plugins() -> None:
    class Plugin:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def register_quant(self, register: Any) -> None:
            register(self.name, lambda: object, api="1", summary="")

    assert {"a", "b"} <= set(load_plugins(extra=[Plugin("a"), Plugin("b")]).quant.names())


def test_a_broken_extra_plugin_raises_at_once() -> None:
    class Broken:
        @hookimpl
        def register_schedulers(self, register: Any) -> None:
            raise TypeError("wrong inside")

    with pytest.raises(PluginError, match="'Broken' of object could not be loaded: TypeError: wrong inside"):
        load_plugins(extra=[Broken()])


class Offer:
    """A plugin that offers one class."""

    def __init__(self, loader: Callable[[], object]) -> None:
        self.loader = loader

    @hookimpl
    def register_attention(self, register: Any) -> None:
        register("offered", self.loader, api="1", summary="")


class Outdated(Complete):
    api = "0"


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
        (lambda: Dictionary, "is not an attrs class"),
        (lambda: MadeOptions, "is not an attrs class"),
        (lambda: OtherLayout, "kv_layout = 'HND', but the KV cache is laid out as NHD only"),
        (lambda: MisspeltGraphs, "graphs = 'decodes'; it must be one of none, decode, any"),
        (lambda: OnePageSize, "block_sizes = 16; it must be a tuple of numbers"),
        (lambda: NoPageSize, "must be a tuple of numbers"),
        (lambda: sys.exit(3), "could not be imported: SystemExit: 3"),
        (lambda: dict, "not a subclass of engine.core.attention.AttentionBackend"),
        (lambda: 3, "not a subclass"),
        (lazy("no_such_module:Thing"), "could not be imported: ModuleNotFoundError"),
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


OFFER = """
from engine.core.hooks import hookimpl

@hookimpl
def register_schedulers(register):
    register("{name}", load, api="1", summary="", preference=99)

def load():
    from engine.plugins.schedulers.fcfs import FirstComeFirstServed
    return type("{name}", (FirstComeFirstServed,), {{}})
"""


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
