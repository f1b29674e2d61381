"""Numbers as `engine top` writes them: rounded, with a unit."""

from __future__ import annotations


def rate(value: float) -> str:
    """A number of two or three digits, or a whole number: 0, 0.012, 0.12, 4.56, 78.9, 1,234."""
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def seconds(value: float) -> str:
    """A time of microseconds to minutes."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 0.9995:
            return f"{rate(value * factor)} {unit}"
    return f"{rate(value * 1e6)} us"


def duration(value: float) -> str:
    """A long time, as 3 d 4 h, 5 h 6 m or 7 m 8 s."""
    whole = max(0, round(value))
    for size_of, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size_of:
            return f"{whole // size_of} {unit} {whole % size_of // part} {smaller}"
    return f"{whole} s"


def size(value: float) -> str:
    """A number of bytes."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if value >= factor:
            return f"{rate(value / factor)} {unit}"
    return f"{value / 1024:.0f} KiB"
