"""The plugin host against packages made on the spot: whole, broken, misspelt, duplicate and outdated ones."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.config.tree import PluginsConfig
from engine.core.errors import ConfigError, PluginError
from engine.core.hooks import hookimpl, lazy
from engine.core.plugin_host.load import load_plugins

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


class Complete:
    """Stands for an implementation; these tests do not import any."""


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


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("(registry)", "(registry)"),
        ("(register, more)", "(register, more)"),
        ("()", "()"),
        ("(register=None)", "()"),
        ("(*register)", "()"),
    ],
)
def test_hook_with_other_arguments_is_refused_with_the_right_ones(install: Install, written: str, shown: str) -> None:
    install("engine-arg", "0.1", POLICY.format(name="m").replace("(register)", written), entry="arg")
    [failure] = load_plugins().failures
    assert str(failure) == (
        f"plugin 'arg' of engine-arg 0.1 has the hook register_schedulers{shown}, which is called with other"
        " arguments; write it as register_schedulers(register)"
    )


def test_hook_that_only_observes_may_leave_out_its_argument() -> None:
    class Observing:
        seen = 0

        @hookimpl
        def engine_started(self) -> None:
            self.seen += 1

    plugin = Observing()
    load_plugins(extra=[plugin]).notify("engine_started", engine=None)
    assert plugin.seen == 1


def test_function_with_the_name_of_a_hook_is_refused_when_it_is_not_marked(install: Install) -> None:
    source = POLICY.format(name="m") + "\ndef register_models(register):\n    register('x')\n"
    install("engine-half", "0.1", source, entry="half")
    [failure] = load_plugins().failures
    assert str(failure) == (
        "plugin 'half' of engine-half 0.1 has a function register_models() that is not marked, so it would not be"
        " called; mark it with @hookimpl of engine.core.hooks, or give it another name"
    )


def test_module_that_imports_all_of_hooks_is_loaded(install: Install) -> None:
    source = POLICY.format(name="m").replace("import hookimpl", "import *")
    install("engine-star", "0.1", source, entry="star")
    assert not load_plugins().failures


def test_function_of_another_name_is_a_hook_when_its_mark_says_which(install: Install) -> None:
    source = POLICY.format(name="m").replace("@hookimpl", '@hookimpl(specname="register_schedulers")')
    install("engine-named", "0.1", source.replace("def register_schedulers", "def offer"), entry="named")
    assert load_plugins().schedulers.get("m").distribution == "engine-named"


def test_function_with_the_name_of_a_hook_is_ignored_when_another_is_marked_as_that_hook(install: Install) -> None:
    source = POLICY.format(name="m").replace("@hookimpl", '@hookimpl(specname="register_schedulers")')
    source = source.replace("def register_schedulers", "def offer") + "\ndef register_schedulers(unused):\n    pass\n"
    install("engine-named", "0.1", source, entry="named")
    assert load_plugins().schedulers.get("m").distribution == "engine-named"


def test_function_with_the_name_of_a_hook_is_ignored_when_it_is_imported_from_another_module(
    install: Install, tmp_path: Path
) -> None:
    (tmp_path / "imported.py").write_text("def register_models(names):\n    pass\n")
    install("engine-imports", "0.1", POLICY.format(name="m") + "\nfrom imported import register_models\n", entry="m")
    assert load_plugins().schedulers.get("m").distribution == "engine-imports"


def test_method_with_the_name_of_a_hook_is_refused_when_it_is_not_marked() -> None:
    class Base:
        def register_models(self, register: Callable[..., None]) -> None:
            """Forgets its mark."""

    class Derived(Base):
        @hookimpl
        def engine_started(self) -> None:
            """Is marked."""

    with pytest.raises(PluginError, match=r"has a function register_models\(\) that is not marked"):
        load_plugins(extra=[Derived()])


def test_hook_that_this_engine_does_not_have_is_ignored_when_its_mark_says_that_it_is_optional(
    install: Install,
) -> None:
    optional = "\n@hookimpl(optionalhook=True)\ndef a_later_hook(anything):\n    raise RuntimeError\n"
    install("engine-later", "0.1", POLICY.format(name="m") + optional, entry="later")
    plugins = load_plugins()
    assert not plugins.failures
    assert plugins.schedulers.get("m").distribution == "engine-later"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('("m", lambda: Policy, summary="s")', "missing a required argument: 'api'"),
        ('("m", lambda: Policy, api="1")', "missing a required argument: 'summary'"),
        ('("m", api="1", summary="s")', "missing a required argument: 'loader'"),
        ('("m", lambda: Policy, "1", "s")', "too many positional arguments"),
        ('("m", lambda: Policy, api="1", sumary="s")', "missing a required argument: 'summary'"),
    ],
)
def test_offer_with_other_arguments_is_refused_with_the_right_ones(
    install: Install, written: str, problem: str
) -> None:
    source = POLICY.format(name="m").replace('("m", lambda: Policy, api="1", summary="for a test")', written)
    install("engine-offer", "0.1", source, entry="offer")
    [failure] = load_plugins().failures
    assert str(failure) == (
        f"plugin 'offer' of engine-offer 0.1 calls register() of register_schedulers() with other arguments: {problem};"
        ' write it as register("name", loader, api="1", summary="one line")'
    )


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


def test_allow_and_deny_choose_entry_points(install: Install) -> None:
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


def test_a_plugin_that_fails_to_load_names_the_line_of_its_own_code(install: Install, tmp_path: Path) -> None:
    install("engine-torn", "0.4", "\nlimit = 3\n@limit.validator\ndef check(): pass\n", entry="torn")
    [failure] = [one for one in load_plugins(quiet=True).failures if one.plugin.name == "torn"]
    place = f"({tmp_path / 'engine_torn_module.py'}, line 3)"
    wrong = "AttributeError: 'int' object has no attribute 'validator'"
    assert str(failure) == f"plugin 'torn' of engine-torn 0.4 could not be loaded: {wrong} {place}"


def test_a_plugin_whose_module_does_not_exist_names_no_line(install: Install) -> None:
    install("engine-gone", "0.4", "", entry="gone", target="no_such_module")
    [failure] = [one for one in load_plugins(quiet=True).failures if one.plugin.name == "gone"]
    assert str(failure).endswith("could not be loaded: ModuleNotFoundError: No module named 'no_such_module'")
