"""`engine plugins`: lists the installed plugins and checks which of them work on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from attrs import asdict, evolve, frozen

from engine.cli.json_output import only_json
from engine.cli.options import OFFLINE, SECTIONS, configured
from engine.cli.plugin_imports import heavy_imports
from engine.cli.tables import print_table
from engine.core.config import AUTO, Resolved
from engine.core.errors import EngineError, PluginError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.plugin_host import Plugins, Question, Registry

    Asked = Question | str
    """How to ask a plugin's class whether it refuses, or a sentence that says why it cannot be asked."""

app = typer.Typer(help="List and check the installed plugins.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
@configured(without=SECTIONS)
def list_plugins(resolved: Resolved, as_json: AsJson = False) -> None:
    """List the plugins of each extension point, without importing any implementation."""
    from engine.core.plugin_host import load_plugins

    columns = ("name", "summary", "distribution", "version", "preference")

    def report() -> dict[str, Any]:
        plugins = load_plugins(resolved.config.plugins)
        offers = {
            point: [
                {
                    **{column: getattr(one, column) for column in columns},
                    "status": "ambiguous" if _ambiguity(registry, one.name) else "",
                }
                for one in registry
            ]
            for point, registry in plugins.registries.items()
        }
        return {"extension_points": offers, "failures": [str(failure) for failure in plugins.failures]}

    if as_json:
        with only_json(indent=2) as print_json:
            print_json(report())
        return
    found = report()
    for point, rows in found["extension_points"].items():
        print_table((*columns, "status"), [tuple(row.values()) for row in rows], title=point)
    for failure in found["failures"]:
        typer.echo(f"failed: {failure}")


@frozen(kw_only=True)
class Verdict:
    """Whether one plugin works here, as `plugins check` reports it."""

    extension_point: str
    name: str
    status: Literal["usable", "refused", "broken", "ambiguous", "loads"]
    """ambiguous: another plugin claims the name, so it cannot be selected; loads: the class can be imported, but not
    asked whether it refuses."""
    reason: str = ""


@app.command()
@configured(without=OFFLINE)
def check(resolved: Resolved, as_json: AsJson = False) -> None:
    """Load every plugin and report whether it can serve this model on this machine. Exit status 1 if one is broken."""
    from engine.core.plugin_host import HOME, load_plugins

    def report() -> tuple[list[Verdict], list[str], list[str]]:
        plugins = load_plugins(resolved.config.plugins)
        slow = heavy_imports(plugins, HOME)  # before any class is loaded
        return check_all(resolved.config, plugins), [str(failure) for failure in plugins.failures], slow

    if as_json:
        with only_json(indent=2) as print_json:
            verdicts, failures, slow = report()
            print_json({"plugins": [asdict(one) for one in verdicts], "failures": failures, "slow": slow})
    else:
        verdicts, failures, slow = report()
        print_table(
            ("name", "extension point", "status", "reason"),
            [(one.name, one.extension_point, one.status, one.reason) for one in verdicts],
        )
        for line in (*(f"failed: {failure}" for failure in failures), *(f"slow: {one}" for one in slow)):
            typer.echo(line)
    if failures or any(one.status == "broken" for one in verdicts):
        raise typer.Exit(1)


def check_all(config: EngineConfig, plugins: Plugins) -> list[Verdict]:
    """Load each class and ask whether it refuses this machine, and this model if its checkpoint can be read."""
    from engine.core.plugin_host import STARTUP_CALLS, guarded, wrong_signature

    classes: dict[tuple[str, str], type[Any]] = {}
    broken: dict[tuple[str, str], str] = {}
    for point, registry in plugins.registries.items():
        for one in registry:
            try:
                cls = one.load()
                classes[point, one.name] = guarded(cls, f"{point} {one.name!r}", STARTUP_CALLS[point])
            except PluginError as error:
                broken[point, one.name] = str(error)
            else:
                problem = wrong_signature(registry.extension_point, cls)
                if problem is not None:
                    broken[point, one.name] = f"{one}: {problem}"
    models = [
        cls
        for (point, name), cls in classes.items()
        if point == "models" and config.model.name in (AUTO, name) and (point, name) not in broken
    ]
    questions = _questions(config, plugins, models)
    verdicts = []
    for point, registry in plugins.registries.items():
        for name in registry.names():
            ambiguity = _ambiguity(registry, name)
            if (point, name) in broken:
                verdicts.append(Verdict(extension_point=point, name=name, status="broken", reason=broken[point, name]))
            elif ambiguity:
                verdicts.append(Verdict(extension_point=point, name=name, status="ambiguous", reason=ambiguity))
            else:
                verdicts.append(_ask(point, name, classes[point, name], questions[point]))
    return verdicts + _check_configured(config, plugins, questions)


def _ambiguity(registry: Registry[Any], name: str) -> str:
    """Why a registered name cannot be selected: another plugin claims it too; empty if it can."""
    try:
        registry.get(name)
    except PluginError as error:
        return str(error)
    return ""


def _check_configured(config: EngineConfig, plugins: Plugins, questions: Mapping[str, Asked]) -> list[Verdict]:
    """The verdicts on what the configuration names and is no registered name: pairs, and names that no plugin has."""
    from engine.core.plugin_host import EXTENSION_POINTS, load_pair

    verdicts = []
    for point in EXTENSION_POINTS:
        name, registry = getattr(config, point.section).name, plugins.registries[point.name]
        if name in registry.names() or name == AUTO or (point.optional and not name):
            continue
        is_pair = point.pairs and "," in name
        try:
            cls = load_pair(point, registry, name)[0] if is_pair else registry.get(name).load()
        except PluginError as error:
            verdicts.append(Verdict(extension_point=point.name, name=name, status="broken", reason=str(error)))
        else:
            verdicts.append(_ask(point.name, name, cls, questions[point.name]))
    return verdicts


def _ask(point: str, name: str, cls: Any, question: Asked) -> Verdict:
    from engine.core.plugin_host import ask

    if isinstance(question, str):
        return Verdict(extension_point=point, name=name, status="loads", reason=question)
    try:
        reason = ask(cls, question)
    except EngineError as error:
        return Verdict(extension_point=point, name=name, status="broken", reason=str(error))
    return Verdict(extension_point=point, name=name, status="refused" if reason else "usable", reason=reason or "")


def _questions(config: EngineConfig, plugins: Plugins, models: list[type[Any]]) -> dict[str, Asked]:
    """Extension point -> how to ask its classes whether they refuse."""
    from engine.core.device import find_device
    from engine.core.hub import locate, locate_speculator
    from engine.core.parsers import Templates
    from engine.core.plugin_host import (
        EXTENSION_POINTS,
        attention_question,
        find_quant,
        model_question,
        parser_question,
        quant_question,
        questions_of_machine,
        speculator_question,
    )
    from engine.core.text import Tokenizer
    from engine.core.weights import Checkpoint

    device = find_device(config.executor.device)
    questions: dict[str, Asked] = dict(questions_of_machine(config, device))
    try:
        directory = locate(config.model, config_only=True).path
        checkpoint = Checkpoint.open(directory, generation_config=config.model.generation_config).config
        questions["model"] = ask_model = model_question(checkpoint)
        model = next((cls for cls in models if _ask("models", "", cls, ask_model).status == "usable"), None)
        if model is None:
            raise PluginError(f"no model plugin takes {config.model.path}")
        config = evolve(config, speculator=locate_speculator(config, config_only=True))
        questions["speculator"] = speculator_question(config, checkpoint, model)
        questions["quant"] = quant_question(checkpoint, device)
        quant = find_quant(config, plugins, device, checkpoint)
        questions["attention"] = attention_question(config, device, checkpoint, model, quant)
    except Exception as error:  # of an unreadable checkpoint or a plugin's own code
        for section in ("model", "speculator", "quant", "attention"):
            questions.setdefault(section, f"not asked whether it can serve this model: {error}")
    try:
        templates = Tokenizer.of_model(evolve(config.model, path=locate(config.model, config_only=True).path)).templates
    except EngineError:  # without a tokenizer, no format is known
        templates = Templates()
    questions["parser"] = parser_question(templates, by_auto=config.parser.name == AUTO)
    return {point.name: questions[point.section] for point in EXTENSION_POINTS}
