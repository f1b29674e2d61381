"""The name under which the model is served."""

from __future__ import annotations

from pathlib import Path

from engine.core.config import EngineConfig


def served_name(config: EngineConfig) -> str:
    """The model's name in the HTTP API: model.served_name, else the name of the checkpoint's directory."""
    return config.model.served_name or Path(config.model.path).resolve().name
