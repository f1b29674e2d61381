"""Recognizes modules that compute what layers of the engine compute, by what they return for random inputs.

Names and source code say nothing: a module is replaced only if its own forward, with small or random weights, returns
what the engine's layer returns, for inputs of all SCALES and positions of the whole context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from engine.core.errors import CheckpointError
from engine.core.layers import RotarySpec, rotate
from engine.core.quant import Activation
from engine.plugins.models.fallback.attention import AttentionCall
from engine.plugins.models.fallback.tensors import make_buffers
from engine.plugins.models.fallback.trace import Blueprint

TOKENS, SMALL, WIDE = 5, 6, 10
"""Sizes of trial inputs: tokens, and features of small linear modules."""
SCALES = (1e-3, 1.0, 1e2, 1e4)
"""Sizes of trial values. Small ones show what is added to them, and large ones where they are limited."""
TOLERANCE = 1e-5
ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


@frozen(kw_only=True)
class FoundNorm:
    """A module that computes weight * x / rms(x) over the last dimension."""

    name: str
    size: int
    eps: float


@frozen(kw_only=True)
class FoundGated:
    """A module that computes down(act(gate(x)) * up(x)), and the names of its linear modules."""

    name: str
    gate: str
    up: str
    down: str
    activation: Activation


@frozen(kw_only=True)
class FoundAttention:
    """A module of projections, norm of heads, rotation of halves, attention and output projection; their names."""

    name: str
    layer: int
    call: AttentionCall
    qkv: tuple[str, str, str]
    output: str
    norms: tuple[str, str] | None
    eps: float


def find_norms(model: Any) -> dict[str, FoundNorm]:
    """The RMS norms of a model, by name."""
    found = {}
    for name, module in model.named_modules():
        given = [value for key, value in vars(module).items() if key.endswith(("eps", "epsilon"))]
        eps: Any = given[0] if given else None
        weight = module._parameters.get("weight")
        alone = (
            isinstance(eps, float)
            and weight is not None
            and weight.dim() == 1
            and list(module._parameters) == ["weight"]
            and not module._modules
            and not module._buffers
        )
        if alone and all(_is_norm(module, eps, scale) for scale in SCALES):
            found[name] = FoundNorm(name=name, size=len(weight), eps=eps)
    return found


def _is_norm(module: Any, eps: float, scale: float) -> bool:
    """Whether a module computes weight * x / rms(x). scale: size of x and of the weight."""
    draw = _draws()
    trial = _with_weight(module, draw, scale)
    x = draw(TOKENS, len(trial.weight)) * scale
    return _returns(lambda: trial(x), F.rms_norm(x, trial.weight.shape, trial.weight, eps))


def find_gated(model: Any, blueprint: Blueprint) -> dict[str, FoundGated]:
    """The gated MLPs of a model, by name."""
    found = {}
    modules = dict(model.named_modules())
    for siblings in blueprint.siblings:
        parent = siblings[0].rpartition(".")[0]
        linears = [name for name, one in modules[parent].named_children() if type(one) is nn.Linear]
        names = [f"{parent}.{name}" for name in linears]
        if len(names) != 3 or len(siblings) != 2 or not set(siblings) < set(names):
            continue
        [down] = set(names) - set(siblings)
        for (gate, up), activation in product((siblings, siblings[::-1]), ACTIVATIONS):
            linear = [name.rpartition(".")[2] for name in (gate, up, down)]
            if all(_is_gated(modules[parent], activation, *linear, scale=scale) for scale in SCALES):
                found[parent] = FoundGated(name=parent, gate=gate, up=up, down=down, activation=activation)
                break
    return found


def _is_gated(module: nn.Module, activation: Activation, gate: str, up: str, down: str, *, scale: float) -> bool:
    """Whether a module computes down(act(gate(x)) * up(x)), tried with small linear modules. scale: size of x."""
    draw = _draws()
    small = {gate: nn.Linear(SMALL, WIDE), up: nn.Linear(SMALL, WIDE), down: nn.Linear(WIDE, SMALL)}
    for one in small.values():
        one.weight.data, one.bias.data = draw(*one.weight.shape), draw(*one.bias.shape)
    trial = _with_modules(module, small)
    x = draw(1, TOKENS, SMALL) * scale
    return _returns(lambda: trial(x), small[down](ACTIVATIONS[activation](small[gate](x)) * small[up](x)))


def find_rotary(model: Any, config: Mapping[str, Any], blueprint: Blueprint) -> RotarySpec | None:
    """The rotary embedding of all layers, if there is one and the engine computes it. None otherwise."""
    rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if len(rotary) != 1 or not isinstance(getattr(rotary[0], "rope_type", None), str):
        return None
    try:
        spec = RotarySpec.from_config(config, blueprint.calls[0].key_dim)
    except CheckpointError:
        return None
    trial = copy.copy(rotary[0])
    trial._buffers = dict(trial._buffers)
    shell = _with_modules(model, {"rotary": trial})
    shell._modules = {"rotary": trial}
    make_buffers(shell, "cpu", frozenset())
    frequencies, factor = spec.frequencies()
    positions = _trial_positions(blueprint.max_len)
    angles = positions[:, None] * torch.cat((frequencies, frequencies))
    wanted = torch.stack((angles.cos(), angles.sin())) * factor
    x = torch.zeros(1, len(positions), 1)
    return spec if _returns(lambda: torch.stack(trial(x, positions[None]))[:, 0], wanted) else None


def find_attention(
    model: Any, blueprint: Blueprint, norms: Mapping[str, FoundNorm], rotary: RotarySpec
) -> dict[str, FoundAttention]:
    """The attention modules of a model that rotate halves of heads by `rotary`, by name."""
    found: dict[str, FoundAttention] = {}
    modules = dict(model.named_modules())
    positions = _trial_positions(blueprint.max_len)
    trials = [(positions, 1.0), *((positions[:TOKENS], scale) for scale in SCALES if scale != 1.0)]
    callers = [call.module for call in blueprint.calls]
    for layer, call in enumerate(blueprint.calls):
        module = modules[call.module]
        children = {f"{call.module}.{name}": one for name, one in module.named_children()}
        linears = [name for name, one in children.items() if type(one) is nn.Linear]
        siblings = next((group for group in blueprint.siblings if set(group) < set(linears)), ())
        heads = [name for name in children if name in norms]
        widths = [modules[name].out_features for name in siblings]
        keys = call.kv_heads * call.key_dim
        if (
            callers.count(call.module) != 1
            or len(linears) != 4
            or widths != [call.heads * call.key_dim, keys, keys]
            or call.value_dim != call.key_dim
            or len(heads) not in (0, 2)
            or any(norms[name].size != call.key_dim or norms[name].eps != norms[heads[0]].eps for name in heads)
        ):
            continue
        [output] = set(linears) - set(siblings)
        pairs = [(heads[0], heads[1]), (heads[1], heads[0])] if heads else [None]
        for pair in pairs:
            one = FoundAttention(
                name=call.module,
                layer=layer,
                call=call,
                qkv=(siblings[0], siblings[1], siblings[2]),
                output=output,
                norms=pair,
                eps=norms[heads[0]].eps if heads else 0.0,
            )
            if all(_attends(module, one, rotary, *trial) for trial in trials):
                found[call.module] = one
                break
    return found


class _Fixed(nn.Module):
    """Stands in for a linear module: returns a copy of a given tensor, or its input if there is none."""

    def __init__(self, result: torch.Tensor | None) -> None:
        super().__init__()
        self._result = result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the given tensor, which the caller may change, or x."""
        return x if self._result is None else self._result.clone()


def _attends(module: Any, one: FoundAttention, rotary: RotarySpec, positions: torch.Tensor, scale: float) -> bool:
    """Whether a module's forward norms, rotates and passes on what its projections return, tried on random heads.

    scale: size of the heads, of what attention returns for them, and of the norms' weights.
    """
    call, draw, tokens = one.call, _draws(), len(positions)
    counts = (call.heads, call.kv_heads, call.kv_heads)
    q, k, v = (draw(tokens, count, call.key_dim) * scale for count in counts)
    attended = draw(1, tokens, call.heads, call.value_dim) * scale
    fixed: dict[str, nn.Module] = {
        name.rpartition(".")[2]: _Fixed(tensor.flatten(1)[None])
        for name, tensor in zip(one.qkv, (q, k, v), strict=True)
    }
    fixed[one.output.rpartition(".")[2]] = _Fixed(None)
    if one.norms:
        short = [name.rpartition(".")[2] for name in one.norms]
        trials = {name: _with_weight(module._modules[name], draw, scale) for name in short}
        fixed |= trials
        q, k = (
            F.rms_norm(heads, (call.key_dim,), trials[name].weight, one.eps)
            for heads, name in zip((q, k), short, strict=True)
        )
    frequencies, factor = rotary.frequencies()
    angles = positions[:, None] * torch.cat((frequencies, frequencies))
    cos, sin = angles.cos() * factor, angles.sin() * factor
    signed = torch.cat((-sin[:, : len(frequencies)], sin[:, len(frequencies) :]), -1)
    wanted = [rotate(heads, (cos[:, None], signed[:, None])) for heads in (q, k)]
    seen: list[torch.Tensor] = []

    def serve(caller: Any, *tensors: Any) -> torch.Tensor:
        seen.extend(tensor[0].transpose(0, 1) for tensor in tensors[:3])
        return attended

    trial = _with_modules(module, fixed)
    trial.engine_attention = serve
    if not _returns(
        lambda: trial(
            hidden_states=draw(1, tokens, SMALL),
            position_embeddings=(cos[None], sin[None]),
            attention_mask=None,
            position_ids=positions[None],
            use_cache=False,
        )[0],
        attended.flatten(2),
    ):
        return False
    return len(seen) == 3 and all(_close(*pair) for pair in zip(seen, (*wanted, v), strict=True))


def _trial_positions(max_len: int) -> torch.Tensor:
    """Positions across a whole context, since a module may treat those beyond some length in another way."""
    found = {0, 7, max_len // 2, max_len - 1, *(4**power for power in range(max_len.bit_length()))}
    return torch.tensor(sorted(position for position in found if position < max_len))


def _with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> Any:
    """A copy of a module with other children."""
    trial = copy.copy(module)
    trial._modules = {**module._modules, **replaced}
    return trial


def _with_weight(module: Any, draw: Callable[..., torch.Tensor], scale: float) -> Any:
    """A copy of a norm on the CPU with a random weight of size `scale`."""
    trial = copy.copy(module)
    trial._parameters = {"weight": nn.Parameter((1 + 0.3 * draw(*module.weight.shape)) * scale, requires_grad=False)}
    return trial


def _draws() -> Callable[..., torch.Tensor]:
    """A function that draws a random tensor of a shape, a new one per call."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def _returns(compute: Callable[[], Any], wanted: torch.Tensor) -> bool:
    """Whether a computation by the library's code returns this tensor, but for rounding."""
    try:
        with torch.inference_mode(), torch.device("cpu"):
            found = compute()
    except Exception:  # of code that needs other inputs or children: it is another network
        return False
    return isinstance(found, torch.Tensor) and _close(found, wanted)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= TOLERANCE * wanted.norm())
