"""`engine config`: shows the settings and the origin of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.options import configured
from engine.cli.tables import print_table
from engine.core.config import HUB_NAMES, PATHS, Resolved, describe, flatten, is_hub_name
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig

HIDDEN = "(set, not shown)"

app = typer.Typer(help="Show the settings and the origin of each.", no_args_is_help=True)


@app.command()
@configured()
def show(
    resolved: Resolved,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: value and origin of each setting.")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a file that --config reads.")] = False,
) -> None:
    """Print every setting with its origin: a default, a file or an option."""
    if as_json and as_toml:
        raise ConfigError("--json and --toml exclude each other; give one of them")
    hidden = secrets(resolved.config)
    rows = [
        (key, HIDDEN if key in hidden else value, resolved.origins[key])
        for key, value in flatten(resolved.config).items()
    ]
    if as_json:
        typer.echo(
            json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2, default=str)
        )
    elif as_toml:
        typer.echo(to_toml(resolved.config))
    else:
        shown = [(key, HIDDEN if key in hidden else _toml(value), origin) for key, value, origin in rows]
        print_table(("setting", "value", "origin"), shown)


def secrets(config: EngineConfig) -> set[str]:
    """Secret settings that are set; their values must not be shown."""
    flat = flatten(config)
    return {setting.key for setting in describe() if setting.secret and flat[setting.key]}


def to_toml(config: EngineConfig) -> str:
    """The configuration as a TOML file; paths are absolute, since relative ones start from the file's directory.

    A secret is left out, with a comment that says so. An option of a plugin may be a path or other text: a comment says
    from which directory a relative path starts.
    """
    hidden = secrets(config)
    sections: dict[str, list[str]] = {}
    for key, value in flatten(config).items():
        section, _, name = key.partition(".")
        is_path = key in PATHS and value and not (key in HUB_NAMES and is_hub_name(value))
        path = str(Path(value).absolute()) if is_path else value
        line = f"# {name}: {HIDDEN}" if key in hidden else f"{name} = {_toml(path)}"
        lines = sections.setdefault(section, [])
        place = config.option_places.get(key)
        if place is not None and isinstance(value, str | list):
            lines.append(f"# a relative path in it starts from {_toml(place.directory or str(Path.cwd()))}")
        lines.append(line)
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items())


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
