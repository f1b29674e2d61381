from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from engine.cli.plugins import check_all
from engine.core.config.tree import AttentionConfig, EngineConfig, ModelConfig
from engine.core.hooks import hookimpl
from engine.core.plugin_host import load
from engine.core.schedulers.policy import API, SchedulingPolicy
from engine.plugins.attention.torch import TorchAttention
from tests.core.runner import state_models


class Fussy(SchedulingPolicy):
    """Refuses every machine."""

    api = API

    @classmethod
    def refuses(cls) -> str | None:
        return "it needs a tide table; install one"

    def order(self, waiting: Any, now: Any) -> Any:
        return waiting

    def victim(self, running: Any) -> Any:
        return running[-1]


class Crashing(Fussy):
    """Raises when asked."""

    @classmethod
    def refuses(cls) -> str | None:
        raise RuntimeError("out of order")


class Mumbling(Fussy):
    """Refuses without a sentence."""

    @classmethod
    def refuses(cls) -> str | None:
        return False


class Unfinished(SchedulingPolicy):
    """Lacks all methods."""

    api = API


class Forgetful(Fussy):
    """Has an order without the time, as no contract has had it."""

    def order(self, waiting: Any) -> Any:  # type: ignore[override]
        return waiting


class LargePages(TorchAttention):
    """Reads no pages but of 64 tokens."""

    block_sizes = (64,)


class Extra:
    """Five policies that cannot serve, and a backend that wants other block sizes."""

    @hookimpl
    def register_attention(self, register: Any) -> None:
        register("largepages", lambda: LargePages, api=API, summary="for tests")

    @hookimpl
    def register_schedulers(self, register: Any) -> None:
        for cls in (Fussy, Crashing, Mumbling, Unfinished, Forgetful):
            register(cls.__name__.lower(), lambda cls=cls: cls, api=API, summary="for tests")


@pytest.fixture
def with_extra(monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = load.load_plugins(extra=[Extra()])
    monkeypatch.setattr(load, "load_plugins", lambda *config: loaded)
    return loaded


def test_the_list_names_every_offer_and_where_it_is_from(run: Any) -> None:
    offers = json.loads(run("plugins", "list", "--json").stdout)
    plugins = load.load_plugins()
    names = {point: [one["name"] for one in rows] for point, rows in offers["extension_points"].items()}
    assert names == {point: list(one.names()) for point, one in plugins.registries.items()}
    assert offers["failures"] == [str(failure) for failure in plugins.failures]
    assert set(offers["extension_points"]["attention"][0]) == {
        "name",
        "summary",
        "distribution",
        "version",
        "preference",
        "status",
    }
    lines = run("plugins", "list").stdout.splitlines()
    for rows in offers["extension_points"].values():
        for one in rows:
            [line] = [line for line in lines if line.split()[:1] == [one["name"]] and one["summary"] in line]
            assert one["distribution"] in line


def test_the_list_names_plugins_that_failed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SimpleNamespace(registries={}, loaded=(), failures=("plugin 'bad' of bad-dist 1 could not be loaded",))
    monkeypatch.setattr(load, "load_plugins", lambda *config: empty)
    result = run("plugins", "list")
    assert "failed: plugin 'bad' of bad-dist 1 could not be loaded" in result.stdout
    assert run("plugins", "check").exit_code == 1


SHARED = """
from engine.core.hooks import hookimpl

@hookimpl
def register_schedulers(register):
    register("shared", load, api="1", summary="")

def load():
    from engine.plugins.schedulers.fcfs import FirstComeFirstServed
    return FirstComeFirstServed
"""


def test_a_name_that_two_distributions_claim_is_marked_in_the_list_and_by_check(install: Any, run: Any) -> None:
    install("engine-first", "1.1", SHARED, entry="first")
    install("engine-second", "2.2", SHARED, entry="second")
    rows = json.loads(run("plugins", "list", "--json").stdout)["extension_points"]["schedulers"]
    assert {one["name"] for one in rows if one["status"] == "ambiguous"} == {"shared"}
    lines = [line.split() for line in run("plugins", "list").stdout.splitlines()]
    assert [line[-1] for line in lines if line[:1] == ["shared"]] == ["ambiguous"]
    [verdict] = [one for one in check_all(EngineConfig(), load.load_plugins()) if one.name == "shared"]
    assert verdict.status == "ambiguous"
    for part in ("engine-first 1.1", "engine-second 2.2", "deny"):
        assert part in verdict.reason


def test_denied_plugins_are_left_out(run: Any) -> None:
    result = run("plugins", "list", "--json", "--set", "plugins.deny=builtin")
    assert not any(json.loads(result.stdout)["extension_points"].values())


def test_check_accepts_the_built_ins(run: Any, engine_checkpoint: Any) -> None:
    result = run("plugins", "check", "--json", "--model", str(engine_checkpoint))
    assert result.exit_code == 0
    verdicts = {(one["extension_point"], one["name"]): one for one in json.loads(result.stdout)["plugins"]}
    assert all(one["status"] in ("usable", "refused") for one in verdicts.values())
    assert verdicts["models", "llama"]["status"] == "usable"
    assert verdicts["models", "qwen3"]["status"] == "refused"
    assert verdicts["models", "qwen3"]["reason"]


def test_check_tells_refused_from_broken(run: Any, with_extra: Any, engine_checkpoint: Any) -> None:
    result = run("plugins", "check", "--json", "--model", str(engine_checkpoint))
    assert result.exit_code == 1
    found = {one["name"]: (one["status"], one["reason"]) for one in json.loads(result.stdout)["plugins"]}
    assert found["fussy"] == ("refused", "it needs a tide table; install one")
    assert found["crashing"][0] == "broken"
    assert "out of order" in found["crashing"][1]
    assert found["mumbling"][0] == "broken"
    assert "with False; it must be a sentence or None" in found["mumbling"][1]
    assert found["unfinished"][0] == "broken"
    assert "victim" in found["unfinished"][1]
    assert found["forgetful"][0] == "broken"
    assert (
        "scheduler 'forgetful' passed in from Python: Forgetful.order takes (self, waiting):" in found["forgetful"][1]
    )
    assert found["largepages"][0] == "refused"
    assert "--block-size" in found["largepages"][1]


def test_check_asks_two_that_are_named_together(run: Any, with_extra: Any, engine_checkpoint: Any) -> None:
    def verdict(name: Any, *options: Any) -> Any:
        result = run("plugins", "check", "--json", "--model", str(engine_checkpoint), "--attention", name, *options)
        [found] = [one for one in json.loads(result.stdout)["plugins"] if one["name"] == name]
        return found["extension_point"], found["status"], found["reason"]

    assert verdict("torch,native")[:2] == ("attention", "usable")
    point, status, reason = verdict("torch,largepages")
    assert (point, status) == ("attention", "refused")
    assert "--block-size" in reason
    assert verdict("torch,largepages", "--block-size", "64")[1] == "usable"
    point, status, reason = verdict("torch,nothing")
    assert (point, status) == ("attention", "broken")
    assert "there is no attention plugin 'nothing'" in reason


@pytest.mark.parametrize(
    ("option", "section", "point"),
    [("--attention", "attention", "attention"), ("--scheduler", "scheduler", "schedulers")],
)
def test_check_fails_where_the_configuration_names_a_plugin_that_is_not_installed(
    run: Any, engine_checkpoint: Any, option: str, section: str, point: str
) -> None:
    result = run("plugins", "check", "--json", "--model", str(engine_checkpoint), option, "nothing")
    assert result.exit_code == 1
    [found] = [one for one in json.loads(result.stdout)["plugins"] if one["name"] == "nothing"]
    assert (found["extension_point"], found["status"]) == (point, "broken")
    assert found["reason"].startswith(f"there is no {section} plugin 'nothing'; known: ")


def test_check_asks_about_the_model_class_that_is_named(engine_checkpoint: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=str(engine_checkpoint), name="states"))
    for attention, advice in (("auto", ""), ("torch", "; leave attention.name (--attention) out")):
        config = evolve(config, attention=AttentionConfig(name=attention))
        verdicts = check_all(config, load.load_plugins(extra=[state_models]))
        reasons = {one.reason for one in verdicts if one.extension_point == "attention"}
        assert reasons == {f"all layers of this model keep a state, and none has attention{advice}"}


def test_check_without_a_readable_model_still_loads_every_class(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=str(tmp_path / "nowhere")))
    verdicts = {(one.extension_point, one.name): one for one in check_all(config, load.load_plugins())}
    assert verdicts["schedulers", "fcfs"].status == "usable"
    assert verdicts["attention", "torch"].status == "loads"
    assert "nowhere" in verdicts["attention", "torch"].reason


def test_check_prints_a_table(run: Any, engine_checkpoint: Any) -> None:
    lines = run("plugins", "check", "--model", str(engine_checkpoint)).stdout.splitlines()
    assert ["fcfs", "schedulers", "usable"] in [line.split() for line in lines]
    assert "torch" in sys.modules


LOUD = """
import os, sys
from engine.core.hooks import hookimpl

print("loaded, in Python")
os.write(1, b"loaded, below Python\\n")
{imports}

@hookimpl
def register_attention(register):
    print("registering")
    register("loud", load, api="1", summary="", preference=99)

def load():
    print("importing")
    from engine.plugins.attention.torch import TorchAttention
    return TorchAttention

@hookimpl
def engine_stopped(engine):
    print("stopped")
"""


def engine_command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that has the plugins in `tmp_path` installed."""
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "command", [["plugins", "list"], ["generate", "def", "--max-tokens", "2", "--set", "plugins.prefer=engine-loud"]]
)
def test_json_is_all_that_is_printed_when_a_plugin_prints(install: Any, tmp_path: Path, command: list[str]) -> None:
    install("engine-loud", "0.4", LOUD.format(imports=""), entry="loud")
    done = engine_command(tmp_path, *command, "--json")
    json.loads(done.stdout)
    assert "loaded, in Python" in done.stderr
    assert "loaded, below Python" in done.stderr
    assert ("stopped" in done.stderr) == (command[0] == "generate")
    notice = "auto took attention 'loud' of engine-loud 0.4, which is not built in"
    assert (notice in done.stderr) == (command[0] == "generate")


def test_check_prints_json_alone_and_names_a_plugin_that_imports_torch_when_it_is_loaded(
    install: Any, tmp_path: Path
) -> None:
    install("engine-quick", "0.1", LOUD.format(imports="").replace("loud", "quick"), entry="quick")
    install("engine-loud", "0.4", LOUD.format(imports="import torch"), entry="loud")
    done = engine_command(tmp_path, "plugins", "check", "--json")
    [sentence] = json.loads(done.stdout)["slow"]
    assert sentence.startswith("plugin 'loud' of engine-loud 0.4 imports torch")
    assert 'lazy("module:Class")' in sentence
    assert "loaded, in Python" in done.stderr
    assert "loaded, below Python" in done.stderr
    assert "stopped" not in done.stderr
    assert "which is not built in" not in done.stderr
