"""Running the command line inside the test process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli.main import app

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """run("config", "show", "--json") -> result with exit_code, stdout and stderr; `input` is standard input."""

    def call(*arguments: str, input: str | None = None) -> Any:  # noqa: A002
        return CliRunner().invoke(app, arguments, input=input)

    return call
