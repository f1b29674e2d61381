"""Attention of the library's modules by an attention backend: the arguments that are served, and the calls in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import frozen

from engine.core.errors import PluginError
from engine.plugins.models.fallback.errors import RefusedError

if TYPE_CHECKING:
    from engine.core.layers import Angles, RotaryEmbedding
    from engine.core.models import ForwardPass

NAME = "engine_paged"
"""Of the attention function in the library's interface."""

WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "layer_idx",
        "logits_to_keep",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that do not change what attention computes."""
SINKS = ("s_aux", "sinks")
"""Names of the argument with attention sinks."""
ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0, None),
    "is_causal": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
"""Arguments -> values that change nothing."""


@frozen
class Arguments:
    """What one call of attention computes, apart from the mask."""

    scale: float
    softcap: float | None
    window: int | None
    """sliding_window, which some modules pass and others leave to the mask."""
    sinks: str | None = None
    """The module's parameter with an attention sink for each query head."""


def read_arguments(module: Any, key_dim: int, given: Mapping[str, Any]) -> Arguments:
    """The arguments of one call. Raises RefusedError for one that no backend computes; nothing is dropped."""
    scale = softcap = window = sinks = None
    for name, value in given.items():
        if name == "scaling":
            scale = value
        elif name == "softcap":
            softcap = value
        elif name == "sliding_window":
            window = value
        elif name in SINKS and value is not None:
            sinks = next((own for own, tensor in module._parameters.items() if tensor is value), None)
            if sinks is None:
                raise RefusedError(f"calls attention with {name} that are no parameter of the module")
        elif name in ACCEPTED:
            if value not in ACCEPTED[name]:
                raise RefusedError(f"calls attention with {name}: {value!r}, which is not computed")
        elif value is not None and value is not False and name not in WITHOUT_EFFECT:
            raise RefusedError(f"calls attention with {name}, which is not computed")
    if getattr(module, "is_causal", True) is False and given.get("is_causal") is None:
        raise RefusedError("attends to later tokens, too; only causal attention is served")
    return Arguments(key_dim**-0.5 if scale is None else float(scale), softcap, window, sinks)


@frozen(kw_only=True)
class AttentionCall:
    """One call of attention in a forward pass; its index is the layer's in the KV cache."""

    module: str
    """Qualified name of the module that calls."""
    arguments: Arguments
    heads: int
    """Over all ranks, as the next two."""
    kv_heads: int
    key_dim: int
    """Of a head of queries and keys."""
    value_dim: int
    window: int | None
    """Tokens that a token attends to, its own included; None: all of them."""


class AttentionCalls:
    """Serves the attention calls of one forward pass, in their order, by the backend of this pass."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self._traced = calls
        self._calls: list[tuple[Any, AttentionCall, tuple[int, int]]] = []
        self._run: ForwardPass | None = None
        self._layer = 0
        self._angles: Angles | None = None

    def bind(self, modules: Mapping[str, Any], places: Sequence[tuple[int, int]]) -> None:
        """Expect calls by these modules. modules: of the model, by name. places: of each layer, its cache group and its
        index in the group.
        """
        self._calls = [(modules[call.module], call, place) for call, place in zip(self._traced, places, strict=True)]

    def begin(self, run: ForwardPass) -> None:
        """Serve the calls of this pass from now on."""
        self._run, self._layer, self._angles = run, 0, None

    def abandon(self) -> None:
        """Forget a pass that failed."""
        self._run = self._angles = None

    def end(self) -> None:
        """Forget the pass. Raises PluginError unless every layer has been computed."""
        self.abandon()
        if self._layer != len(self._calls):
            raise PluginError(
                f"the forward called attention {self._layer} times, and {len(self._calls)} times when it was traced"
            )

    def next_call(self, module: Any) -> tuple[ForwardPass, AttentionCall, tuple[int, int]]:
        """The pass, the traced call and the layer's place, for a module that calls attention now."""
        run, layer = self._run, self._layer
        if run is None or layer == len(self._calls):
            raise PluginError("the forward called attention more often than when it was traced")
        expected, call, place = self._calls[layer]
        if module is not expected:
            raise PluginError(f"a module other than {call.module}, which the trace met here, called attention")
        self._layer += 1
        return run, call, place

    def angles(self, rotary: RotaryEmbedding, run: ForwardPass) -> Angles:
        """The rotary embedding's angles of this pass, computed for the first layer that asks."""
        if self._angles is None:
            self._angles = rotary.angles(run.batch.positions)
        return self._angles

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: Mapping[str, Any],
    ) -> torch.Tensor:
        """query: [1, heads, tokens, key_dim]; key and value with KV heads -> [1, tokens, heads, value_dim]."""
        run, call, (group, layer) = self.next_call(module)
        run = run.of_group(group)
        alike = mask is None and key.shape[2] == query.shape[2]
        if not alike or read_arguments(module, call.key_dim, given) != call.arguments:
            raise PluginError(f"{call.module} calls attention otherwise than when it was traced")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if call.value_dim < call.key_dim:
            v = F.pad(v, (0, call.key_dim - call.value_dim))
        q, k, v = _dense(q), _dense(k), _dense(v)
        run.pool.write(layer, k, v, run.batch.slots)
        out = run.attention.forward(layer, q, k, v, run.plan)
        return out[..., : call.value_dim].contiguous().unsqueeze(0)  # contiguous: modules view it


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with dense last two dimensions, as backends expect."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the library's modules call it, computed by the module's `engine_attention`."""
    return module.engine_attention(module, query, key, value, attention_mask, given), None


def register() -> None:
    """Make the function known to the library under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def serve_attention(model: Any, serve: Any) -> None:
    """Have `serve` compute the attention of all modules of a model."""
    for module in model.modules():
        module.engine_attention = serve
