"""Which plugin serves each seam, and why: names resolved to classes, refusals collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from engine.core.attention import AttentionBackend
    from engine.core.executors import Executor
    from engine.core.models import Model
    from engine.core.quant import QuantMethod
    from engine.core.schedulers import SchedulingPolicy


@frozen(kw_only=True)
class Choice:
    """The plugin chosen for one seam."""

    seam: str
    name: str
    provenance: str
    """Distribution and version it comes from, or "object" when it was passed in."""
    reason: str
    """Why this one, in a few words; for auto, with the refusals of those preferred to it."""


@frozen(kw_only=True)
class Parts:
    """The plugins of one engine, resolved: classes and their validated options."""

    attention: type[AttentionBackend]
    quant: type[QuantMethod]
    policy: SchedulingPolicy
    executor: type[Executor]
    model: type[Model]
    options: Mapping[str, Any]
    """By seam (attention, quant, executors, models): an instance of the plugin's options_class, or None."""
    choices: tuple[Choice, ...]
