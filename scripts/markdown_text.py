"""Markdown of generated pages: tables and code."""

from __future__ import annotations

from typing import Any


def table(columns: tuple[str, ...], rows: Any) -> str:
    """A Markdown table."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def code(text: str) -> str:
    """Text as code; empty text stays empty."""
    return f"`{text}`" if text else ""
