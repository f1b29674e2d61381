"""Annotates every call of a model's modules for torch.profiler, between `add` and `remove`.

The class of an object is replaced by a subclass whose methods run within an annotation, and restored afterwards. So the
object and all references to it stay as they are, and nothing is left on the path of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from engine.core.distributed.rank_group import RankGroup
from engine.core.layers import LayerFactory, RotaryEmbedding
from engine.core.profiling.count import attention_name, counted_name
from engine.core.profiling.layer_events import COLLECTIVE, KERNEL, MODULE, PART

if TYPE_CHECKING:
    from engine.core.attention.groups import CacheLayout
    from engine.core.runner.device_state import DeviceState

MODEL = "(model)"
"""What a model computes outside of its layers."""
SAMPLING = "(sampling)"
ROTARY = "(rotary embedding)"

CALLS = (
    "__call__",
    "gated",
    "gated_quantized_for",
    "gated_into",
    "quantized_for",
    "into",
    "greedy",
    "look_up",
    "angles",
)
"""The methods by which models and layers call layers."""
MODEL_CALLS = ("forward", "logits", "greedy")
SAMPLING_CALLS = ("update", "flush", "sample", "prompt_logprobs", "capture")
ATTENTION_CALLS = ("forward", "forward_into")
COLLECTIVE_CALLS = ("all_reduce", "all_gather", "broadcast")

Label = Callable[[tuple[Any, ...]], str]
"""The arguments of a call -> the name of its annotation."""
Method = Callable[..., Any]


class ModuleRanges:
    """The annotations of one rank's modules."""

    def __init__(self, state: DeviceState, layers: LayerFactory, layout: CacheLayout, group: RankGroup) -> None:
        """layers: the factory that made the model's layers."""
        self._state = state
        self._layers = layers
        self._layout = layout
        self._group = group
        self._replaced: list[tuple[object, type]] = []

    def add(self) -> None:
        """Annotate all calls from now on. Raises TypeError, and annotates none, if a class cannot be subclassed."""
        try:
            for instance, calls, label in self._annotated():
                self._replace(instance, {name: _within(label) for name in calls})
        except BaseException:
            self.remove()
            raise

    def observe(self, instance: object, method: str, notify: Callable[[Any], None]) -> None:
        """Call `notify` with each result of a method, until `remove`."""

        def observed(own: Method) -> Method:
            @functools.wraps(own)
            def call(self: object, *args: Any, **kwargs: Any) -> Any:
                result = own(self, *args, **kwargs)
                notify(result)
                return result

            return call

        self._replace(instance, {method: observed})

    def remove(self) -> None:
        """Restore all classes; a second call does nothing."""
        while self._replaced:
            instance, cls = self._replaced.pop()
            object.__setattr__(instance, "__class__", cls)

    def _replace(self, instance: object, wrappers: Mapping[str, Callable[[Method], Method]]) -> None:
        """Replace an object's class by a subclass that wraps the methods of `wrappers` that the class has."""
        cls = type(instance)
        own = {name: getattr(cls, name, None) for name in wrappers}
        methods = {name: wrappers[name](method) for name, method in own.items() if method is not None}
        namespace = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods}
        metaclass: Any = type(cls)
        made = metaclass(cls.__name__, (cls,), namespace)
        object.__setattr__(instance, "__class__", made)
        self._replaced.append((instance, cls))

    def _annotated(self) -> Iterator[tuple[object, tuple[str, ...], Label]]:
        """Each object, its methods to annotate, and the annotation's name."""
        state, layers = self._state, self._layers
        known: dict[int, tuple[object, str]] = {
            id(layer): (layer, counted_name(layers, layer)) for layer in layers.layers
        }
        for number, (_, attention) in layers.attentions.items():
            known[id(attention)] = attention, attention_name(layers, number)
        tree = _Tree({key: name for key, (_, name) in known.items()})
        tree.visit(state.model)
        for instance, name in (*known.values(), *tree.found):
            if instance is not state.model:
                yield instance, CALLS, _constant(MODULE + name)
        yield state.model, MODEL_CALLS, _constant(MODULE + MODEL)
        sampler = state.sampler
        for instance in (sampler, sampler.greedy_path, sampler.draw_path, sampler.full_path):
            yield instance, SAMPLING_CALLS, _constant(MODULE + SAMPLING)
        names = {
            place: (PART if number in layers.attentions else MODULE) + attention_name(layers, number)
            for number, place in enumerate(self._layout.places)
        }
        for number, group in enumerate(state.groups):
            if group.attention is not None:
                yield group.attention, ATTENTION_CALLS, _constant(KERNEL)
                yield group.attention, ATTENTION_CALLS, _by_layer(names, number)
        if self._group.ranks > 1:
            yield self._group, COLLECTIVE_CALLS, _constant(COLLECTIVE)


class _Tree:
    """Finds the objects around known layers, and names each by what the names of its layers have in common."""

    def __init__(self, known: Mapping[int, str]) -> None:
        """known: the layers' names by id; the layers are not searched."""
        self._known = known
        self._names: dict[int, list[str]] = {}
        self._kept: list[object] = []
        """The objects visited, so that no id is reused."""
        self.found: list[tuple[object, str]] = []

    def visit(self, node: object) -> list[str]:
        """Search an object; return the names of all layers within."""
        name = self._known.get(id(node))
        if name is not None:
            return [name]
        if id(node) in self._names:
            return self._names[id(node)]
        self._names[id(node)] = []  # while its parts are searched, which may refer to it
        self._kept.append(node)
        names = list(dict.fromkeys(name for part in self._parts(node) for name in self.visit(part)))
        self._names[id(node)] = names
        if isinstance(node, RotaryEmbedding):
            self.found.append((node, ROTARY))
        elif names and not isinstance(node, (list, tuple, set, dict)) and callable(node):
            self.found.append((node, _common(names)))
        return names

    def _parts(self, node: object) -> list[object]:
        """The parts of an object that can be or have layers."""
        if isinstance(node, dict):
            return list(node.values())
        if isinstance(node, (list, tuple, set)):
            return list(node)
        package = type(node).__module__.partition(".")[0]
        if isinstance(node, (torch.Tensor, type, RankGroup, LayerFactory)) or package in (
            "builtins",
            "types",
            "functools",
        ):
            return []
        values = list(getattr(node, "__dict__", {}).values())
        if isinstance(node, torch.nn.Module):  # whose other attributes may refer to the whole model
            kept = (value for value in values if id(value) in self._known or isinstance(value, RotaryEmbedding))
            return [*node.children(), *kept]
        slots = (slot for cls in type(node).__mro__ for slot in _slots(cls))
        return [*values, *(getattr(node, slot) for slot in slots if hasattr(node, slot))]


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _common(names: list[str]) -> str:
    """The beginning that dotted names have in common."""
    words = takewhile(lambda part: len(set(part)) == 1, zip(*(name.split(".") for name in names), strict=False))
    return ".".join(part[0] for part in words) or MODEL


def _constant(label: str) -> Label:
    return lambda args: label


def _by_layer(names: Mapping[tuple[int, int], str], group: int) -> Label:
    """A name by the call's first argument, the number of the layer in its cache group."""
    return lambda args: names[group, args[0]]


def _within(label: Label) -> Callable[[Method], Method]:
    """A decorator that runs a method within an annotation."""

    def wrap(own: Method) -> Method:
        @functools.wraps(own)
        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label(args)):
                return own(self, *args, **kwargs)

        return call

    return wrap
