"""The name of a model: on the hub, and in the HTTP interface."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig

_ORG_AND_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_hub_name(text: str, path: Path | None = None) -> bool:
    """Whether `text` is the name of a model on the hub (ORG/NAME), and no path.

    A path that exists wins over a name. path: the one that `text` would be; None: that from the working directory.
    """
    return _ORG_AND_NAME.fullmatch(text) is not None and not (path or Path(text)).exists()


def served_name(config: EngineConfig) -> str:
    """The model's name in the HTTP interface: model.served_name, else its name on the hub, else the directory's."""
    path = config.model.path
    return config.model.served_name or (path if is_hub_name(path) else Path(path).resolve().name)
