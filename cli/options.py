"""Command-line options, generated from the configuration tree and from SamplingParams."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from engine.cli.otel_variables import tracing_defaults
from engine.core.config import (
    DEFAULT,
    EngineConfig,
    Resolved,
    Setting,
    canonical_key,
    demo_model,
    describe,
    is_hub_name,
    load_config,
    sections,
)
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.types import SamplingParams

DEMO_MODEL = "default (demo model)"
"""Origin of model.path where no model is named."""

KEY_VARIABLE = "ENGINE_API_KEY"
"""Environment variable that gives server.api_key, so that keys need no option, which other users could see."""
ADMIN_KEY_VARIABLE = "ENGINE_ADMIN_API_KEY"
"""Environment variable that gives server.admin_api_key, for the same reason."""

SETTING_SUFFIX = "_setting"
"""End of the names of parameters that are options of settings."""

MODEL = "model"
"""Parameter of the argument that names the model."""
SECTIONS = tuple(section.name for section in sections())
OFFLINE = ("server", "parser")
"""Sections without meaning for a command without a server: `configured(without=OFFLINE)`."""

Command = Callable[..., Any]
Given = tuple[object, str]
"""The value of a setting, and its origin."""


def purpose(section: str) -> str:
    """The purpose of a section of the configuration, from its docstring."""
    doc = inspect.getdoc(type(getattr(EngineConfig(), section))) or ""
    return doc.partition("\n")[0].rpartition("]: ")[2].rstrip(".")


def given_settings(resolved: Resolved) -> dict[str, str]:
    """Setting -> where it was given: on the command line or in a file.

    Settings from environment variables are left out: variables are set for all commands, not for this one.
    """
    by_default = (DEFAULT, DEMO_MODEL)
    return {
        key: origin for key, origin in resolved.origins.items() if origin not in by_default and origin not in os.environ
    }


def refuse_settings(resolved: Resolved, *, but: Collection[str] = ()) -> None:
    """Raise ConfigError for a setting given to a command whose server runs already. but: keys allowed."""
    for key, origin in given_settings(resolved).items():
        if key not in but:
            raise ConfigError(f"{key} (by {origin}) is a setting of the server, which runs already; leave it out")


def _default_text(setting: Setting) -> str:
    """A setting's default as typed on the command line; "" for an empty one."""
    if setting.type is bool:
        return "on" if setting.default else "off"
    if isinstance(setting.default, tuple):
        return ",".join(setting.default)
    return str(setting.default) if setting.default not in ("", {}) else ""


def configured(*, without: Collection[str] = (), before: str = "") -> Callable[[Command], Command]:
    """Decorator: builds the command's parameter `resolved` from MODEL, --config, --set and one option per setting.

    without: sections that get no options; without "model", there is no MODEL either. before: the command's own
    argument, which follows MODEL; a single argument is this one, not MODEL.
    """
    offered = {name: one for name, one in _setting_options().items() if one.setting.path[0] not in without}
    parameters = [
        *([] if "model" in without else [_model_argument(before)]),
        _option("files", list[Path] | None, "--config", help="TOML or YAML file of settings.", metavar="FILE"),
        _option(
            "assignments",
            list[str] | None,
            "--set",
            help="Any setting, as server.max_n=8 or plugins.deny=[a,b]. Repeat for more.",
            metavar="SECTION.KEY=VALUE",
        ),
        *(one.parameter for one in offered.values()),
    ]

    def resolve(given: Mapping[str, Any]) -> Resolved:
        overrides = _overrides(offered, given)
        _choose_model(overrides, given.get(MODEL))
        return load_config(_only_file(given["files"]), overrides, _defaults(has_server="server" not in without))

    return lambda command: _with_options(command, "resolved", parameters, resolve, before)


def _overrides(offered: Mapping[str, _SettingOption], given: Mapping[str, Any]) -> dict[str, Given]:
    """The settings given by options and by --set. Raises ConfigError for one that is given twice."""
    overrides: dict[str, Given] = {}

    def override(key: str, value: object, origin: str) -> None:
        if key in overrides:
            raise ConfigError(f"{key} is given twice, by {overrides[key][1]} and by {origin}; give it once")
        overrides[key] = (value, origin)

    for name, one in offered.items():
        setting, value = one.setting, given[name]
        if setting.type is dict:
            for text in value or ():
                option, typed = key_value(text, one.flag)
                override(f"{setting.key}.{option}", typed, one.flag)
        elif value is not None:
            override(setting.key, value, one.flag)
    for text in given["assignments"] or ():
        key, typed = key_value(text, "--set")
        override(canonical_key(key), typed, "--set")
    return overrides


def _choose_model(overrides: dict[str, Given], model: str | None) -> None:
    """Set model.path to the argument MODEL, if it is given. Raises ConfigError for an empty name, or for two."""
    if model is not None:
        other, origin = overrides.get("model.path", (model, MODEL.upper()))
        if other != model:
            raise ConfigError(f"MODEL ({model}) and {origin} ({other}) name two models; give one of them")
        overrides["model.path"] = (model, MODEL.upper())
    named, origin = overrides.get("model.path", (DEMO_MODEL, ""))
    if not named:
        raise ConfigError(
            f"{origin} is empty; give a directory or a name on the hub (ORG/NAME), or leave it out, for the demo model"
        )


def _only_file(files: Sequence[Path] | None) -> Path | None:
    """The file of --config; None: there is none. Raises ConfigError for several."""
    if not files:
        return None
    if len(files) > 1:
        raise ConfigError(
            f"--config is given twice, as {files[0]} and as {files[1]}; a command reads one file: "
            "put the settings into one, or give those of the other by options"
        )
    return files[0]


def _defaults(*, has_server: bool) -> dict[str, Given]:
    """The settings that take precedence over the tree's defaults: the demo model, and environment variables."""
    defaults: dict[str, Given] = {"model.path": (demo_model(), DEMO_MODEL)}
    for variable, key in ((KEY_VARIABLE, "server.api_key"), (ADMIN_KEY_VARIABLE, "server.admin_api_key")):
        if keys := os.environ.get(variable, ""):
            defaults[key] = ([one.strip() for one in keys.split(",")], variable)
    if has_server:
        defaults |= tracing_defaults(os.environ)
    return defaults


def _model_argument(before: str) -> inspect.Parameter:
    """The parameter MODEL."""
    alone = f" A single argument is {before.upper()}." if before else ""
    text = f"Directory of the model, or its name on the hub (ORG/NAME); by default that of --model.{alone}"
    return inspect.Parameter(
        MODEL,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[str | None, typer.Argument(help=text, show_default=False)],
    )


def _shift(given: dict[str, Any], before: str) -> None:
    """Take a single argument as the command's own, not as MODEL. Raises ConfigError if it looks like a model."""
    only = given[MODEL]
    if only is None or given[before] is not None:
        return
    if is_hub_name(only) and given["model_setting"] is None:
        raise ConfigError(
            f"{only} is the only argument, so it is {before.upper()}, but it looks like a model; give both, with - for"
            f" standard input: {only} - (or name the model by --model)"
        )
    given[before], given[MODEL] = only, None


def sampled(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator: builds the command's parameter `sampling`, the SamplingParams fields given on the command line.

    without: fields that get no options, besides `grammar`, which no single option can express.
    """
    help_texts = _attribute_docs(SamplingParams)
    hints = typing.get_type_hints(SamplingParams)
    fields = {name: hint for name, hint in hints.items() if name not in (*without, "grammar")}
    parameters = [_sampling_option(name, hint, help_texts.get(name, "")) for name, hint in fields.items()]

    def collect(given: Mapping[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name in fields:
            value = given[name]
            if name == "logit_bias" and value:
                value = [_bias(text) for text in value]
            if isinstance(value, list):
                value = tuple(value) or None
            if value is not None:
                chosen[name] = value
        return chosen

    return lambda command: _with_options(command, "sampling", parameters, collect)


def key_value(text: str, flag: str) -> tuple[str, str]:
    """Split KEY=VALUE. Raises ConfigError naming the flag."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{flag} {text!r} is not of the form KEY=VALUE")
    return key, value


def _with_options(
    command: Command,
    parameter: str,
    options: Sequence[inspect.Parameter],
    build: Callable[[Mapping[str, Any]], object],
    before: str = "",
) -> Command:
    """Replace the `parameter` of a command by `options`; `build` makes the argument from their values.

    before: see `configured`.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
    arguments = [option for option in options if option.kind is not inspect.Parameter.KEYWORD_ONLY]
    names = [option.name for option in options]

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        if before:
            _shift(given, before)
        argument = build({name: given.pop(name) for name in names})
        return command(**given, **{parameter: argument})

    others = [option for option in options if option not in arguments]
    signature = inspect.Signature(sorted([*arguments, *own, *others], key=lambda parameter: parameter.kind))
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return run


def _option(name: str, hint: Any, *declarations: str, help: str, **settings: Any) -> inspect.Parameter:  # noqa: A002
    """A keyword parameter that typer reads as an option without a default. help: plain text."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint, typer.Option(*declarations, help=help.replace("[", r"\["), **settings)],
    )


@attrs.frozen
class _SettingOption:
    """An option of the command line that gives a setting."""

    setting: Setting
    flag: str
    parameter: inspect.Parameter


@functools.cache
def _setting_options() -> dict[str, _SettingOption]:
    """Parameter name -> option, for every flag and alias of a setting; the same for all commands."""
    flags = [(one, flag) for one in describe() if one.flag for flag in (one.flag, *one.alias_flags)]
    names = [flag.removeprefix("--").replace("-", "_") + SETTING_SUFFIX for _, flag in flags]
    return {
        name: _SettingOption(setting, flag, _setting_option(name, setting, flag))
        for name, (setting, flag) in zip(names, flags, strict=True)
    }


def _setting_option(name: str, setting: Setting, flag: str) -> inspect.Parameter:
    """The option `flag` of a setting. Options that are aliases are hidden; the help of the first names them."""
    hidden = flag != setting.flag
    hint: Any = str | None  # load_config converts and checks, so that a file and an option get the same error
    metavar = setting.type_name.upper()
    help_text = f"{setting.help} ({', '.join(setting.choices)})" if setting.choices else setting.help
    if setting.alias_flags:
        help_text += f" Also {', '.join(setting.alias_flags)}."
    if setting.type is bool:
        hint, flag, metavar = bool | None, _on_off(flag), " "
    elif setting.type is dict:
        hint, metavar = list[str] | None, "KEY=VALUE"
    section = setting.path[0]
    return _option(
        name,
        hint,
        flag,
        help=help_text,
        metavar=metavar,
        hidden=hidden,
        show_default=_default_text(setting) or False,
        rich_help_panel=f"{section}: {purpose(section)}",
    )


def _sampling_option(name: str, hint: Any, help_text: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    words = {int: "INTEGER", float: "NUMBER", str: "STRING", bool: " "}
    repeated = typing.get_origin(hint) is tuple
    kind: Any = typing.get_args(hint)[0] if repeated or isinstance(hint, types.UnionType) else hint
    metavar = words.get(kind, "ID=BIAS")
    if repeated:
        kind = list[int] if kind is int else list[str]
        help_text += " Repeat for more."
    declaration = _on_off(flag) if kind is bool else flag
    return _option(name, kind | None, declaration, help=help_text, metavar=metavar, rich_help_panel="sampling")


def _on_off(flag: str) -> str:
    return f"{flag}/--no-{flag.removeprefix('--')}"


def _bias(text: str) -> tuple[int, float]:
    token, value = key_value(text, "--logit-bias")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidRequestError(f"--logit-bias {text!r} is not of the form ID=BIAS", "logit_bias") from None


@functools.cache
def _attribute_docs(cls: type) -> dict[str, str]:
    """The docstring below each attribute of a class, read from the source (Python does not keep them), on one line."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    docs = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(below.value))).replace("\n", " ")
    return docs
