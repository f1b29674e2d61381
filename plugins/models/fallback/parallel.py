"""How ranks share a model, by the library's own tensor-parallel plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from engine.core.errors import ConfigError
from engine.core.layers import LayerFactory
from engine.core.quant import Parallel
from engine.plugins.models.fallback.trace import Blueprint

LINEAR_STYLES: Mapping[str, Parallel] = {
    "colwise": "column",
    "rowwise": "row",
    # Every rank computes the whole layer; what the library gathers or splits around it is whole on every rank.
    "colwise_gather_output": "none",
    "colwise_rep": "none",
    "mla_kv_a_proj": "none",
    "replicate": "none",
    "replicated_with_grad_allreduce": "none",
    "rowwise_split_input": "none",
    "rowwise_rep": "none",
}
"""Style of a linear module -> how ranks share the layer."""
REPLICATED_STYLES = frozenset({"replicate", "replicated_with_grad_allreduce"})
"""Styles of other modules that every rank holds whole."""
HEAD_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes in which attention modules keep numbers of heads."""


class ParallelPlan:
    """The library's plan for a model; one rank needs none."""

    def __init__(self, model: Any, ranks: int) -> None:
        """Raises ConfigError if several ranks are to share a model without a plan."""
        self._styles: Mapping[str, str] = (getattr(model, "tp_plan", None) or {}) if ranks > 1 else {}
        self._ranks = ranks
        if ranks > 1 and not self._styles:
            raise ConfigError(
                f"transformers has no tensor-parallel plan for {type(model).__name__}, so {ranks} ranks cannot share"
                " it; use --tensor-parallel 1"
            )

    def style(self, name: str) -> str | None:
        """Style of a module or parameter; None: the plan does not name it."""
        return self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def linear(self, name: str) -> Parallel:
        """How ranks share a linear module. Raises ConfigError for a style that the engine's layers do not have."""
        style = self.style(name)
        if style is not None and style not in LINEAR_STYLES:
            raise ConfigError(self._refusal(name, style))
        return "none" if style is None else LINEAR_STYLES[style]

    def check_tensor(self, module: nn.Module, name: str, attribute: str) -> None:
        """Check that every rank may hold this tensor of a module whole: what it computes is then whole, too.

        Raises ConfigError otherwise.
        """
        if self._ranks == 1 or is_experts(module):
            return
        for named in (name, f"{name}.{attribute}"):
            style = self.style(named)
            if style is not None and style not in REPLICATED_STYLES:
                raise ConfigError(self._refusal(named, style))

    def _refusal(self, name: str, style: str) -> str:
        return (
            f"the tensor-parallel plan of transformers shards {name} by {style!r}, which {self._ranks} ranks of this"
            " engine cannot; use --tensor-parallel 1"
        )


def is_experts(module: nn.Module) -> bool:
    """Whether a module is the library's experts, whose weights every rank holds whole."""
    return hasattr(module, "_apply_gate")


def check_heads(blueprint: Blueprint, plan: ParallelPlan, layers: LayerFactory, model: Any) -> None:
    """Check that the projections of attention give each rank its heads, and set the modules' numbers of heads.

    Raises ConfigError.
    """
    if layers.ranks == 1:
        return
    modules = dict(model.named_modules())
    for call in blueprint.calls:
        local = {
            call.heads: layers.shard(call.heads, "query heads"),
            call.kv_heads: layers.shard_kv_heads(call.kv_heads),
        }
        children = [f"{call.module}.{name}" for name, _ in modules[call.module].named_children()]
        if not any(plan.style(name) == "colwise" for name in children):
            raise ConfigError(
                f"the tensor-parallel plan of transformers gives every rank all heads of {call.module}, but the KV"
                " cache of a rank holds only its own; use --tensor-parallel 1"
            )
        for attribute in HEAD_ATTRIBUTES:
            found = getattr(modules[call.module], attribute, None)
            if isinstance(found, int) and found in local:
                setattr(modules[call.module], attribute, local[found])
