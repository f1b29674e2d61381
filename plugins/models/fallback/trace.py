"""Runs an architecture's forward without numbers, on the meta device, and notes what an engine must know of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.plugins.models.fallback.attention import AttentionCall, attend, read_arguments, serve_attention
from engine.plugins.models.fallback.errors import RefusedError
from engine.plugins.models.fallback.library import build_empty, decoder_of, longest
from engine.plugins.models.fallback.masks import MaskFunction, sliding_window

NAME = "engine_trace"
"""Of the attention and mask functions in the library's interfaces."""
NAME_WITHOUT_MASK = "engine_trace_without_mask"
"""Of the attention function alone, so that the library makes no masks."""
TOKENS = 3
EXPERTS = "batched_mm"
"""The library's implementation of experts whose shapes do not depend on the routing."""


@frozen(kw_only=True)
class Blueprint:
    """What one forward pass of an architecture does, by config.json alone."""

    calls: tuple[AttentionCall, ...]
    """The calls of attention, in order."""
    linears: frozenset[str]
    """Names of the plain linear modules that compute in the model's dtype."""
    siblings: tuple[tuple[str, ...], ...]
    """Names of linear modules that are given one and the same input, once per pass."""
    hidden_size: int
    vocab_size: int
    max_len: int
    waits: str | None
    """The operation for which the forward waits for the device, so that CUDA graphs cannot hold it; None: there is
    none."""
    experts: bool
    """Whether the library's own expert modules compute a part, with weights that are not linear modules."""


def blueprint(config: Mapping[str, Any]) -> Blueprint:
    """Trace the architecture of a config.json. Raises RefusedError."""
    return _blueprint(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _blueprint(text: str) -> Blueprint:
    config = json.loads(text)
    _register()
    model = build_empty(config, torch.float32, NAME, EXPERTS)
    max_len = longest(model)
    masked, plain = (_run(model, max_len, masked=masked) for masked in (True, False))
    if [evolve(call, window=None) for call in masked.calls] != plain.calls:
        raise RefusedError("calls attention otherwise without a mask than with one")
    if not masked.calls:
        raise RefusedError("has no attention that the library's interface computes")
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise RefusedError(f"has an output layer of {type(head).__name__}, and only linear ones are served")
    name = next(name for name, module in model.named_modules() if module is head)
    if "." in name:
        raise RefusedError(f"has its output layer inside another module ({name}), which is not served")
    return Blueprint(
        calls=tuple(masked.calls),
        linears=frozenset(plain.inputs) - plain.kept,
        siblings=plain.siblings(),
        hidden_size=plain.hidden_size,
        vocab_size=head.out_features,
        max_len=max_len,
        waits=plain.waits,
        experts=any(hasattr(module, "_apply_gate") for module in model.modules()),
    )


@define
class _Noted:
    """The record of one traced pass."""

    max_len: int
    windows: dict[int, tuple[MaskFunction, int | None]] = field(factory=dict)
    """Identity of a mask function -> the function and its window."""
    calls: list[AttentionCall] = field(factory=list)
    inputs: dict[str, list[torch.Tensor]] = field(factory=dict)
    """Linear module -> its inputs."""
    kept: set[str] = field(factory=set)
    """Linear modules not to replace: of another dtype than the model's, or whose weight other code reads."""
    waits: str | None = None
    hidden_size: int = 0

    def siblings(self) -> tuple[tuple[str, ...], ...]:
        """Groups of linear modules of one module with one input tensor, in the order of their calls."""
        groups: dict[tuple[int, str], list[str]] = {}
        for name, inputs in self.inputs.items():
            if len(inputs) == 1 and name not in self.kept:
                groups.setdefault((id(inputs[0]), name.rpartition(".")[0]), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _run(model: Any, max_len: int, *, masked: bool) -> _Noted:
    """One forward pass of the base model. masked: with a mask of ones, so that layers get masks to recognize."""
    noted = _Noted(max_len)
    names = {module: name for name, module in model.named_modules()}
    model.set_attn_implementation(NAME if masked else NAME_WITHOUT_MASK)
    serve_attention(model, functools.partial(_note_call, noted, names, masked))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    given: dict[str, Any] = {"attention_mask": torch.ones_like(tokens)} if masked else {}
    linears: dict[str, Any] = {name: one for name, one in model.named_modules() if type(one) is torch.nn.Linear}
    hooks = [
        one.register_forward_pre_hook(functools.partial(_note_linear, noted, name)) for name, one in linears.items()
    ]
    for name, one in linears.items():
        one.note_read = functools.partial(noted.kept.add, name)
        one.__class__ = _WatchedLinear
    try:
        with torch.inference_mode(), _Waits(noted):
            out = decoder_of(model)(input_ids=tokens, position_ids=tokens, use_cache=False, **given)[0]
    except RefusedError:
        raise
    except Exception as error:  # of the library's code, which may need a cache, numbers or other inputs
        raise RefusedError(
            f"cannot be computed for tokens and positions alone: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for module in linears.values():
            module.__class__ = torch.nn.Linear
    if out.dim() != 3 or out.shape[:2] != tokens.shape:
        raise RefusedError(f"returns hidden states of shape {tuple(out.shape)} for {TOKENS} tokens")
    noted.hidden_size = out.shape[2]
    return noted


class _WatchedLinear(torch.nn.Linear):
    """A linear module that reports reads of its weight other than by its own forward."""

    note_read: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        """As of any module."""
        if name == "weight":
            self.note_read()
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As of any linear module."""
        weight: Any = self._parameters["weight"]
        return functional.linear(x, weight, self._parameters["bias"])


def _note_linear(noted: _Noted, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    noted.inputs.setdefault(name, []).append(inputs[0])
    weight = module._parameters["weight"]
    if inputs[0].dtype != torch.float32 or weight is None or weight.dtype != torch.float32:
        noted.kept.add(name)


def _note_call(
    noted: _Noted,
    names: Mapping[Any, str],
    masked: bool,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Note one call of attention, and return a tensor of its result's shape."""
    arguments = read_arguments(module, key.shape[3], given)
    if any(tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != TOKENS for tensor in (query, key, value)):
        raise RefusedError("attends to other tokens than those of the text (cross attention, or several streams)")
    if value.shape[3] > key.shape[3] or value.shape[1] != key.shape[1] or query.shape[1] % key.shape[1]:
        raise RefusedError(
            f"has heads that no KV cache holds: queries {tuple(query.shape[1::2])}, keys {tuple(key.shape[1::2])},"
            f" values {tuple(value.shape[1::2])} (heads, dimensions)"
        )
    window = None
    if masked:
        if mask is None or not hasattr(mask, "engine_pattern"):
            raise RefusedError("makes attention masks of its own, which no backend computes")
        pattern = mask.engine_pattern
        if id(pattern) not in noted.windows:
            noted.windows[id(pattern)] = (pattern, sliding_window(pattern, noted.max_len))
        window = noted.windows[id(pattern)][1]
        if arguments.window not in (None, window):
            raise RefusedError(f"asks for a window of {arguments.window} tokens and masks all but {window}")
    elif mask is not None:
        raise RefusedError("makes attention masks of its own, which no backend computes")
    noted.calls.append(
        AttentionCall(
            module=names[module],
            arguments=arguments,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window,
        )
    )
    return query.new_empty(1, TOKENS, query.shape[1], value.shape[3])


class _Waits(TorchFunctionMode):
    """Answers the host's reads of meta tensors with zeros, and notes the first operation that waits for the device."""

    def __init__(self, noted: _Noted) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            is_search = name in SEARCHES and len(args) == 1  # torch.where with one argument searches, too
            if name in READS or is_search:
                self._noted.waits = self._noted.waits or name
            if is_search:
                found = torch.empty(1, args[0].dim(), dtype=torch.int64, device="meta")
                return found.unbind(1) if name == "where" or (kwargs or {}).get("as_tuple") else found
            if name in READS:
                return READS[name](args[0])
        return func(*args, **(kwargs or {}))


SEARCHES = ("argwhere", "nonzero", "where")
"""Functions whose result has as many rows as the device finds; one is assumed."""
READS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "__bool__": lambda tensor: False,
    "__float__": lambda tensor: 0.0,
    "__index__": lambda tensor: 0,
    "__int__": lambda tensor: 0,
    "equal": lambda tensor: False,
    "item": lambda tensor: False if tensor.dtype == torch.bool else 0,
    "tolist": lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu").tolist(),
}
"""Functions by which the host reads what the device has computed -> the answer without numbers."""


def _mask(*, q_length: int, kv_length: int, mask_function: MaskFunction, **others: Any) -> torch.Tensor:
    """The library's mask function under NAME: a mask that carries its pattern (`engine_pattern`)."""
    mask: Any = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.engine_pattern = mask_function
    made: torch.Tensor = mask
    return made


def _register() -> None:
    """Make the functions of a trace known to the library."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (NAME, NAME_WITHOUT_MASK):
        AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(NAME, _mask)
