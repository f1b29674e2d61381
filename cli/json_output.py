"""Keeps standard output for the JSON that a command prints."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer


@contextmanager
def only_json(*, indent: int | None = None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that prints an object as JSON when the `with` block has ended.

    Whatever the block prints otherwise goes to standard error: what plugins and libraries print when they are imported,
    run and closed, in Python, in C and in processes that are started.
    """
    documents: list[Any] = []
    with _descriptor_redirected(sys.stdout), redirect_stdout(sys.stderr):
        yield documents.append
    for document in documents:
        typer.echo(json.dumps(document, indent=indent))


@contextmanager
def _descriptor_redirected(stdout: Any) -> Iterator[None]:
    """Redirect the descriptor of standard output to standard error; a no-op without descriptors, as in tests."""
    try:
        target, source = stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):
        yield
        return
    stdout.flush()
    saved = os.dup(target)
    try:
        os.dup2(source, target)
        yield
    finally:
        os.dup2(saved, target)
        os.close(saved)
