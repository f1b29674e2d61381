"""Command-line options made from the configuration tree and from SamplingParams: no setting is written twice."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from engine.core.config import EngineConfig, Resolved, Setting, describe, load_config
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.types import SamplingParams

DEMO_MODEL = "default (demo model)"
"""Origin of model.path when nobody named a model."""

SECTIONS = tuple(attrs.fields_dict(EngineConfig))
OFFLINE = ("server",)
"""Sections without meaning for a command that serves nobody: `configured(without=OFFLINE)`."""

Command = Callable[..., Any]


def purpose(section: str) -> str:
    """What a section of the configuration is for, in a few words."""
    doc = inspect.getdoc(type(getattr(EngineConfig(), section))) or ""
    return doc.partition("\n")[0].rpartition("]: ")[2].rstrip(".")


def _default_text(setting: Setting) -> str:
    """A setting's default as one types it; nothing for an empty one."""
    if setting.type is bool:
        return "on" if setting.default else "off"
    return str(setting.default) if setting.default not in ("", {}, ()) else ""


def configured(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator: gives the command's parameter `resolved` from --config, --set and one option for each setting.

    without: sections that get no options.
    """
    offered = {name: one for name, one in _setting_options().items() if one[0].path[0] not in without}
    flags = {name: setting for name, (setting, _) in offered.items()}
    parameters = [
        _option("config", Path | None, "--config", help="TOML or YAML file of settings.", metavar="FILE"),
        _option(
            "assignments",
            list[str] | None,
            "--set",
            help="Any setting, as server.max_n=8.",
            metavar="SECTION.KEY=VALUE",
        ),
        *(option for _, option in offered.values()),
    ]

    def resolve(given: Mapping[str, Any]) -> Resolved:
        overrides: dict[str, tuple[object, str]] = {}

        def override(key: str, value: object, origin: str) -> None:
            if key in overrides:
                raise ConfigError(f"{key} is given twice, by {overrides[key][1]} and by {origin}; give it once")
            overrides[key] = (value, origin)

        for name, setting in flags.items():
            value = given[name]
            if setting.type is dict:
                for text in value or ():
                    option, typed = key_value(text, str(setting.flag))
                    override(f"{setting.key}.{option}", typed, str(setting.flag))
            elif value is not None:
                override(setting.key, value, str(setting.flag))
        for text in given["assignments"] or ():
            key, typed = key_value(text, "--set")
            override(key, typed, "--set")
        return load_config(given["config"], overrides, {"model.path": (_demo_model(), DEMO_MODEL)})

    return lambda command: _with_options(command, "resolved", parameters, resolve)


def sampled(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator: gives the command's parameter `sampling`, the SamplingParams fields that were on the command line.

    without: fields that get no options.
    """
    help_texts = _attribute_docs(SamplingParams)
    fields = {name: hint for name, hint in typing.get_type_hints(SamplingParams).items() if name not in without}
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
) -> Command:
    """`command` with its `parameter` replaced by `options`, from whose values `build` makes the argument."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
    names = [option.name for option in options]

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        argument = build({name: given.pop(name) for name in names})
        return command(**given, **{parameter: argument})

    signature = inspect.Signature([*own, *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return run


def _option(name: str, hint: Any, *declarations: str, **settings: Any) -> inspect.Parameter:
    """A keyword parameter that typer reads as an option without a default."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint, typer.Option(*declarations, **settings)],
    )


@functools.cache
def _setting_options() -> dict[str, tuple[Setting, inspect.Parameter]]:
    """Parameter name -> setting and option, for each setting that has a flag; the same for all commands."""
    names = {setting.key.replace(".", "__"): setting for setting in describe() if setting.flag}
    return {name: (setting, _setting_option(name, setting)) for name, setting in names.items()}


def _setting_option(name: str, setting: Setting) -> inspect.Parameter:
    flag = str(setting.flag)
    hint: Any = str | None  # load_config converts and checks, so that a file and an option get the same error
    metavar = setting.type_name.upper()
    help_text = f"{setting.help} ({', '.join(setting.choices)})" if setting.choices else setting.help
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
        raise InvalidRequestError(f"--logit-bias {text!r} is not a token number = a number", "logit_bias") from None


@functools.cache
def _attribute_docs(cls: type) -> dict[str, str]:
    """The string below each attribute of a class, which Python itself does not keep; first paragraph, one line."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    docs = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(below.value))).replace("\n", " ")
    return docs


def _demo_model() -> str:
    import engine.demo

    try:
        return str(engine.demo.path())
    except FileNotFoundError:
        return ""
