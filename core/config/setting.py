"""Defines a setting with its help text, option and aliases, and finds settings that are not the default."""

from __future__ import annotations

from typing import Any

import attrs


def setting(
    default: Any,
    text: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """Define one setting.

    flag: its command-line option; None: the file or --set sets it. aliases: other names, as other engines call the
    setting; each is a key of the section and, with dashes, an option. choices: all possible values; never names of
    plugins, which are open. secret: the value is never shown.
    """
    metadata = {"help": text, "flag": flag, "aliases": aliases, "choices": choices, "secret": secret}
    if isinstance(default, dict):
        return attrs.field(factory=dict, metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


def changed_settings(section: Any) -> list[str]:
    """Names of the settings of a section whose values are not the defaults."""
    defaults = type(section)()
    names = [field.name for field in attrs.fields(type(section))]
    return [name for name in names if getattr(section, name) != getattr(defaults, name)]
