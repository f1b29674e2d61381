"""The settings as they are described, and the keys by which they can be spelled."""

from __future__ import annotations

import attrs
import pytest

from engine.core.config.setting_list import describe, join_key, split_key
from engine.core.config.tree import sections


def test_every_setting_is_described() -> None:
    settings = describe()
    expected = [f"{section.name}.{one.name}" for section in sections() for one in attrs.fields(type(section.default))]
    assert [setting.key for setting in settings] == expected
    assert all(setting.help.endswith(".") and setting.type_name for setting in settings)
    flags = [setting.flag for setting in settings if setting.flag]
    assert len(set(flags)) == len(flags)
    for setting in settings:
        assert isinstance(setting.default, setting.type)
        assert not setting.choices or setting.default in setting.choices


@pytest.mark.parametrize("path", [("a", "b"), ("a", "b.c"), ("a", 'q"q', "x y")])
def test_a_dotted_key_can_be_split_again(path: tuple[str, ...]) -> None:
    assert split_key(join_key(path)) == path


def test_every_alias_names_one_setting() -> None:
    keys = {setting.path for setting in describe()}
    spellings = [
        spelling
        for setting in describe()
        for alias in setting.aliases
        for spelling in ((setting.path[0], alias), (alias,))
    ]
    flags = [(flag,) for one in describe() if one.flag for flag in (one.flag, *one.alias_flags)]
    assert len({*spellings, *flags, *keys}) == len(spellings) + len(flags) + len(keys)
