"""Models of the Hugging Face hub: found by name, downloaded into huggingface_hub's cache, read from there offline."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.hub.files import CONFIG_ONLY as CONFIG_ONLY, Wanted as Wanted
    from engine.core.hub.names import locate as locate, locate_speculator as locate_speculator
    from engine.core.hub.snapshot import Snapshot as Snapshot, fetch as fetch

__getattr__, __dir__, __all__ = exports(
    __name__,
    files=("CONFIG_ONLY", "Wanted"),
    names=("locate", "locate_speculator"),
    snapshot=("Snapshot", "fetch"),
)
