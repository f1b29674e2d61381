from __future__ import annotations

import pytest

from engine.core.config.limits import BOUNDS, NEEDED, parse_bytes
from engine.core.config.setting_list import describe
from engine.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("500mb", 500_000_000), ("3KiB", 3072), ("7B", 7)],
)
def test_parse_bytes_reads_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e9", "2GiB2"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="2GiB"):
        parse_bytes(text)


def test_every_number_has_bounds_that_hold_its_default() -> None:
    numbers = {setting.key: setting.default for setting in describe() if setting.type in (int, float)}
    assert set(BOUNDS) == set(numbers)
    for key, default in numbers.items():
        low, high = BOUNDS[key]
        assert low <= default <= high


def test_needed_settings_and_those_that_need_them_exist() -> None:
    known = {setting.key for setting in describe()}
    for section, needed in NEEDED.items():
        assert {f"{section}.{name}" for key, others in needed.items() for name in (key, *others)} <= known
