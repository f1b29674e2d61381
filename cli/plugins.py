"""`engine plugins`: which plugins are installed, and which of them would work here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import asdict, frozen

from engine.cli.options import OFFLINE, SECTIONS, configured
from engine.cli.tables import print_table
from engine.core.config import Resolved
from engine.core.errors import EngineError, PluginError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.plugin_host import Plugins, Question

app = typer.Typer(help="List and check the installed plugins.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
@configured(without=SECTIONS)
def list_plugins(resolved: Resolved, as_json: AsJson = False) -> None:
    """List what each plug point has to offer. Loads no implementation."""
    from engine.core.plugin_host import load_plugins

    plugins = load_plugins(resolved.config.plugins)
    columns = ("name", "summary", "distribution", "version", "preference")
    failures = [str(failure) for failure in plugins.failures]
    offers = {
        seam: [{column: getattr(one, column) for column in columns} for one in registry]
        for seam, registry in plugins.seams.items()
    }
    if as_json:
        typer.echo(json.dumps({"seams": offers, "failures": failures}, indent=2))
        return
    for seam, rows in offers.items():
        print_table(columns, [tuple(row.values()) for row in rows], title=seam)
    for failure in failures:
        typer.echo(f"failed: {failure}")


@frozen(kw_only=True)
class Verdict:
    """What `plugins check` says of one plugin."""

    seam: str
    name: str
    status: str
    """usable, refused, broken, or loads where the question cannot be put."""
    reason: str = ""


@app.command()
@configured(without=OFFLINE)
def check(resolved: Resolved, as_json: AsJson = False) -> None:
    """Load every plugin and say whether it would serve this model on this machine. Exit status 1 if one is broken."""
    from engine.core.plugin_host import load_plugins

    plugins = load_plugins(resolved.config.plugins)
    verdicts = check_all(resolved.config, plugins)
    failures = [str(failure) for failure in plugins.failures]
    if as_json:
        typer.echo(json.dumps({"plugins": [asdict(one) for one in verdicts], "failures": failures}, indent=2))
    else:
        print_table(
            ("name", "seam", "status", "reason"), [(one.name, one.seam, one.status, one.reason) for one in verdicts]
        )
        for failure in failures:
            typer.echo(f"failed: {failure}")
    if failures or any(one.status == "broken" for one in verdicts):
        raise typer.Exit(1)


def check_all(config: EngineConfig, plugins: Plugins) -> list[Verdict]:
    """Load each class and ask it whether it refuses this machine, and this model if one can be read."""
    classes: dict[tuple[str, str], type[Any]] = {}
    broken: dict[tuple[str, str], str] = {}
    for seam, registry in plugins.seams.items():
        for one in registry:
            try:
                classes[seam, one.name] = one.load()
            except PluginError as error:
                broken[seam, one.name] = str(error)
    questions = _questions(config, plugins, [cls for (seam, _), cls in classes.items() if seam == "models"])
    verdicts = []
    for seam, registry in plugins.seams.items():
        for name in registry.names():
            if (seam, name) in broken:
                verdicts.append(Verdict(seam=seam, name=name, status="broken", reason=broken[seam, name]))
            else:
                verdicts.append(_ask(seam, name, classes[seam, name], questions[seam]))
    return verdicts + _check_pairs(config, plugins, questions)


def _check_pairs(
    config: EngineConfig, plugins: Plugins, questions: Mapping[str, Callable[[type[Any]], str | None] | str]
) -> list[Verdict]:
    """The same for two plugins that the configuration names together."""
    from engine.core.plugin_host import EXTENSION_POINTS, load_pair

    verdicts = []
    for seam in EXTENSION_POINTS:
        name = getattr(config, seam.section).name
        if seam.pairs and "," in name:
            try:
                cls, _ = load_pair(seam, plugins.seams[seam.name], name)
            except PluginError as error:
                verdicts.append(Verdict(seam=seam.name, name=name, status="broken", reason=str(error)))
            else:
                verdicts.append(_ask(seam.name, name, cls, questions[seam.name]))
    return verdicts


def _ask(seam: str, name: str, cls: Any, question: Callable[[type[Any]], str | None] | str) -> Verdict:
    from engine.core.plugin_host import ask

    if isinstance(question, str):
        return Verdict(seam=seam, name=name, status="loads", reason=question)
    try:
        reason = ask(cls, f"{seam} {name!r}", question)
    except EngineError as error:
        return Verdict(seam=seam, name=name, status="broken", reason=str(error))
    return Verdict(seam=seam, name=name, status="refused" if reason else "usable", reason=reason or "")


def _questions(
    config: EngineConfig, plugins: Plugins, models: list[type[Any]]
) -> dict[str, Callable[[type[Any]], str | None] | str]:
    """How to ask a class of each seam whether it refuses; a sentence where it cannot be asked."""
    from engine.core.device import find_device
    from engine.core.plugin_host import (
        EXTENSION_POINTS,
        attention_question,
        find_quant,
        model_question,
        quant_question,
        questions_of_machine,
    )
    from engine.core.weights import Checkpoint

    device = find_device(config.executor.device)
    questions: dict[str, Question | str] = dict(questions_of_machine(config, device))
    try:
        checkpoint = Checkpoint.open(config.model.path, generation_config=config.model.generation_config).config
        questions["model"] = ask_model = model_question(checkpoint)
        model = next((cls for cls in models if _ask("models", "", cls, ask_model).status == "usable"), None)
        if model is None:
            raise PluginError(f"no model plugin takes {config.model.path}")
        questions["quant"] = quant_question(checkpoint, device)
        quant = find_quant(config, plugins, device, checkpoint)
        questions["attention"] = attention_question(config, device, checkpoint, model, quant)
    except Exception as error:  # of a checkpoint that cannot be read, or of a plugin's own code
        for section in ("model", "quant", "attention"):
            questions.setdefault(section, f"not asked whether it would serve this model: {error}")
    return {seam.name: questions[seam.section] for seam in EXTENSION_POINTS}
