"""Writes files atomically: a reader sees the old content or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path, part: Path | None = None) -> Iterator[Path]:
    """Yield the path of an empty file, which the caller fills; then it is synced to disk and replaces `path`.

    part: the path of that file, which no other process may use; None: a unique one next to `path`. The file has the
    default permissions, whatever a library that fills it has set. If the caller raises, the file is removed and `path`
    stays as it is. Raises OSError.
    """
    if part is None:
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    part.unlink(missing_ok=True)
    part.touch(exist_ok=False)
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; see `new_file`."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")
