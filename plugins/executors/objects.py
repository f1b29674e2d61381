"""What cannot be had in another process."""

from __future__ import annotations

from engine.core.errors import PluginError
from engine.core.selection import Parts


def refuse_objects(parts: Parts) -> None:
    """Raise PluginError if a part that workers need was passed in from Python: it is in this process alone."""
    for choice in parts.choices:
        if choice.seam in ("attention", "quant", "models") and choice.provenance == "object":
            raise PluginError(
                f"{choice.seam} {choice.name!r} was passed in as an object, which other processes cannot have; "
                "offer it as an installed plugin, or use --executor uniproc"
            )
