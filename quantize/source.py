"""The checkpoint to quantize: its tensors, and its linear layers according to the engine's model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from attrs import frozen
from safetensors import safe_open

from engine.core.config import load_config
from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import Experts, LayerFactory, Linear, torch_dtype
from engine.core.models import ModelSpec
from engine.core.plugin_host import DTYPES, load_plugins, resolve, shape_of
from engine.core.quant import LinearKernel, LinearPart, LinearSpec, stored_tensor
from engine.core.weights import INDEX, SINGLE, Checkpoint, StoredTensor, TensorFile, read_json
from engine.plugins.quant.kv_cache_scheme import KVCacheScheme
from engine.plugins.quant.none import Unquantized
from engine.plugins.quant.packing import WORD
from engine.plugins.quant.quantization_config import is_listed
from engine.plugins.quant.rounding import BLOCK
from engine.quantize.formats import make_format
from engine.quantize.settings import NONE, Settings

LAYER = re.compile(r"^(.*\.layers\.(\d+))\.(.+)$")
"""Name of a tensor in a decoder layer: prefix of the layer, its number, name within the layer."""


class Source:
    """Tensors of a checkpoint, read on demand."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads the headers. Raises CheckpointError if safetensors files are missing or damaged."""
        self.checkpoint = checkpoint
        directory = checkpoint.path
        if (directory / INDEX).is_file():
            files = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        elif (directory / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise CheckpointError(f"{directory} has no {SINGLE} and no {INDEX}; give a checkpoint in safetensors files")
        self._files = {name: TensorFile(directory / name) for name in files}
        self._open = {name: safe_open(directory / name, framework="pt", device="cpu") for name in files}
        self._file_of = {tensor: name for name, file in self._files.items() for tensor in file.tensors}
        self.file_sizes = {name: (directory / name).stat().st_size for name in files}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def stored(self, name: str) -> StoredTensor:
        """A tensor's entry in the header of its file."""
        return self._files[self._file_of[name]].tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor to the CPU."""
        file: Any = self._open[self._file_of[name]]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights in config.json; float32 if it has none."""
        config = self.checkpoint.config
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if stored not in DTYPES:
            raise CheckpointError(f"the checkpoint's dtype is {stored}; quantize one of {', '.join(DTYPES)}")
        return torch_dtype(stored)

    def fingerprint(self) -> str:
        """Identifies the checkpoint: a hash of config.json and of the names and sizes of the files."""
        text = repr((sorted(self.checkpoint.config.items(), key=str), sorted(self.file_sizes.items())))
        return blake2b(text.encode(), digest_size=8).hexdigest()


@frozen(kw_only=True)
class DecoderLayer:
    """One decoder layer of a checkpoint."""

    number: int
    prefix: str
    """Prefix of its tensors' names, as model.layers.0."""
    names: tuple[str, ...]
    """Names of its tensors, without the prefix."""
    merged: tuple[tuple[str, ...], ...]
    """Names within the layer of its quantized linear layers. Those of one input, served as one matrix, are a group."""
    kv_scales: tuple[str, ...] = ()
    """Names within the layer of its KV scales. Empty: not requested, or the layer has no cache."""


@frozen(kw_only=True)
class Blueprint:
    """The decoder layers to quantize, and the other tensors."""

    layers: tuple[DecoderLayer, ...]
    unquantized: tuple[str, ...]
    """Full names of linear layers, routers among them, in decoder layers that are not quantized."""
    outside: tuple[str, ...]
    """Full names of modules that are not quantized and in no decoder layer: LM heads, and those with matrices that the
    model does not read, as in a vision tower."""
    unquantized_experts: tuple[str, ...]
    """Full names of modules with all experts of a layer, none of which is quantized."""
    has_expert_modules: bool
    """Whether the checkpoint has a module per expert; transformers, which runs text, has stacked experts."""
    others: tuple[str, ...]
    """Names of tensors outside the decoder layers."""
    spec: ModelSpec


def make_blueprint(source: Source, settings: Settings, device: DeviceInfo) -> Blueprint:
    """Find the linear layers, by building the engine's model of the checkpoint without weights.

    Raises CheckpointError if the checkpoint is quantized already, lacks tensors of its model, or could not be served
    once quantized; PluginError if no plugin builds the model; ConfigError if settings do not fit its sizes.
    """
    checkpoint = source.checkpoint
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path} is quantized already ({checkpoint.quantization.get('quant_method', 'method unnamed')}),"
            " and quantizing it again would only lose digits; give the checkpoint that it was made from"
        )
    config = load_config(overrides={"model.path": (str(checkpoint.path), "argument")}).config
    parts = resolve(config, load_plugins(config.plugins), device, checkpoint.config)
    written = {**checkpoint.config, "quantization_config": make_format(settings, source.dtype).config()}
    refusal = parts.model.refuses(written)
    if refusal is not None:
        raise CheckpointError(f"the engine could not serve {checkpoint.path} once quantized: {refusal}")
    quant = _Recorder(KVCacheScheme(has_scales=settings.kv_cache is not None))
    factory = LayerFactory(dtype="float32", device="cpu", quant=quant, stored=source.names)
    parts.model(checkpoint.config, factory, parts.options["models"])
    merged: dict[str, list[tuple[str, ...]]] = {}
    unquantized: list[str] = []
    unquantized_experts: list[str] = []
    for layer in factory.layers:
        if isinstance(layer, Experts):
            spec = layer.spec
            linears = [linear for expert in range(spec.num_experts) for linear in spec.linears(expert)]
            # No format of linear layers describes stacked experts.
            if spec.stacked or not _add(source, settings, linears, merged, experts=spec.name):
                unquantized_experts.append(spec.name)
        elif isinstance(layer, Linear) and quant.asked_for(layer.spec):
            if not _add(source, settings, [layer.spec], merged):
                unquantized += dict.fromkeys(part.stored_name for part in layer.spec.parts)
        else:
            matrices = [factory.stored_name(name) for name, one in layer.tensors().items() if len(one.shape) > 1]
            unquantized += [_module(name) for name in matrices if LAYER.match(name)]
    if not merged and settings.method != NONE:
        raise ConfigError(
            "--ignore leaves every linear layer alone, so that nothing would be quantized; --method none --kv-cache fp8"
            " is for the KV cache alone"
        )
    if settings.kv_cache and not factory.kv_scales:
        raise CheckpointError(
            f"the plugin that builds the model of {checkpoint.path} gives its attention layers no names, and so would"
            " not read scales of their keys and values; leave out --kv-cache"
        )
    scales = [name for reader in factory.kv_scales for name in (reader.names.keys[0], reader.names.values[0])]
    read = _names_read(factory)
    prefixes = {match[1] for name in read if (match := LAYER.match(name))}
    members = [name for name in source.names if (match := LAYER.match(name)) and match[1] in prefixes]
    inside = set(members)
    not_read = [name for name in source.names if name not in read and len(source.stored(name).shape) > 1]
    heads = [*quant.heads, *(_module(factory.stored_name(name)) for name in factory.tied)]
    return Blueprint(
        layers=tuple(_layers(members, merged, scales)),
        unquantized=tuple(unquantized),
        outside=tuple(dict.fromkeys([*heads, *map(_module, not_read)])),
        unquantized_experts=tuple(unquantized_experts),
        has_expert_modules=any(isinstance(layer, Experts) and not layer.spec.stacked for layer in factory.layers),
        others=tuple(name for name in source.names if name not in inside),
        spec=shape_of(parts.model, checkpoint.config),
    )


def _names_read(factory: LayerFactory) -> set[str]:
    """Names of the checkpoint's tensors that the model's layers read."""
    tensors = [pair for layer in factory.layers for pair in layer.tensors().items()]
    return {factory.stored_name(stored_tensor(name, spec)) for name, spec in tensors}


def _module(tensor: str) -> str:
    """Name of the module whose weight a tensor is; the tensor's own name if that does not end in .weight."""
    return tensor.removesuffix(".weight")


class _Recorder(Unquantized):
    """Records the linear layers that a quantization method is asked for; routers are not among them."""

    def __init__(self, kv_cache: KVCacheScheme) -> None:
        super().__init__(kv_cache)
        self._asked: set[str] = set()
        self.heads: list[str] = []
        """Names of output layers."""

    def linear(self, spec: LinearSpec) -> LinearKernel | None:
        self._asked.update(part.name for part in spec.parts)
        return None

    def lm_head(self, spec: LinearSpec) -> LinearKernel | None:
        self.heads += [part.stored_name for part in spec.parts]
        return None

    def asked_for(self, spec: LinearSpec) -> bool:
        """Whether the method was asked for a linear layer."""
        return spec.parts[0].name in self._asked


def _add(
    source: Source,
    settings: Settings,
    linears: Sequence[LinearSpec],
    merged: dict[str, list[tuple[str, ...]]],
    *,
    experts: str = "",
) -> bool:
    """Add linear layers that must be quantized alike to `merged`: prefix of a decoder layer -> names within it, by
    input. Returns False if the settings leave them unquantized.

    experts: name of the module whose experts the linear layers are; empty: `linears` is one merged layer.
    """
    groups = [dict.fromkeys(part.stored_name for part in linear.parts) for linear in linears]
    names = [name for group in groups for name in group]
    ignored = [name for name in names if settings.method == NONE or is_listed(name, settings.ignore)]
    if ignored and len(ignored) < len(names):
        other = next(name for name in names if name not in ignored)
        advice = f"multiplied as one matrix, so ignore all of {', '.join(names)}, or none"
        if experts:
            advice = f"quantized alike, so ignore all experts ({_pattern_of(experts)}), or none"
        raise ConfigError(f"--ignore leaves {ignored[0]} alone but not {other}; they are {advice}")
    for linear in linears:
        for part in linear.parts:
            outputs = part.out_features if part.stored_in is None else part.stored_in.size
            _check_tensor(source, part.stored_name, (outputs, linear.in_features))
            if not ignored:
                _check_sizes(settings, part.stored_name, outputs, linear.in_features, experts)
                _check_blocks(settings, part)
    if ignored:
        return False
    for group in groups:
        found = [LAYER.match(name) for name in group]
        if any(match is None for match in found):
            raise CheckpointError(f"{next(iter(group))} is in no decoder layer (NAME.layers.N); give --ignore for it")
        merged.setdefault(found[0][1], []).append(tuple(match[3] for match in found))  # type: ignore[index]
    return True


def _layers(
    names: Sequence[str], merged: Mapping[str, list[tuple[str, ...]]], scales: Sequence[str]
) -> Iterator[DecoderLayer]:
    """The decoder layers, in order. names: of their tensors."""
    members: dict[tuple[int, str], list[str]] = {}
    for name in names:
        if match := LAYER.match(name):
            members.setdefault((int(match[2]), match[1]), []).append(match[3])
    for number, prefix in sorted(members):
        yield DecoderLayer(
            number=number,
            prefix=prefix,
            names=tuple(members[number, prefix]),
            merged=tuple(merged.get(prefix, ())),
            kv_scales=tuple(name.removeprefix(f"{prefix}.") for name in scales if name.startswith(f"{prefix}.")),
        )


def _check_tensor(source: Source, module: str, shape: tuple[int, int]) -> None:
    name = f"{module}.weight"
    if name not in source.names:
        raise CheckpointError(f"{source.checkpoint.path} lacks the tensor {name}, which its model needs")
    if source.stored(name).shape != shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(source.stored(name).shape)}; the model expects {list(shape)}"
        )


def _check_sizes(settings: Settings, module: str, outputs: int, inputs: int, experts: str) -> None:
    """Raises ConfigError if the linear layer's sizes do not divide into groups or words. experts: as in `_add`."""
    if settings.is_eight_bit:
        return
    size, per_word = settings.group_size, WORD // settings.bits
    advice = f'give --ignore "re:.*{re.escape(module.rpartition(".")[2])}" (and what is merged with it)'
    if experts:
        advice = f"give --ignore {_pattern_of(experts)}"
    if size != -1 and inputs % size:
        fitting = [str(one) for one in (128, 64, 32, 16) if inputs % one == 0]
        use = f"use --group-size {' or '.join([*fitting, '-1'])}"
        raise ConfigError(
            f"{module} has {inputs} inputs, which --group-size {size} does not divide; {use}, or {advice}"
        )
    if inputs % per_word or outputs % per_word:
        raise ConfigError(
            f"{module} has {outputs} outputs and {inputs} inputs; {settings.bits} bits are packed {per_word} in a word,"
            f" along either; {advice}"
        )


def _check_blocks(settings: Settings, part: LinearPart) -> None:
    """Raises ConfigError if a block of weights with one scale would span two parts of a stored layer."""
    if settings.granularity == "block" and part.stored_in is not None and part.out_features % BLOCK:
        last = re.escape(part.stored_name.rpartition(".")[2])
        raise ConfigError(
            f"{part.stored_name} holds {part.out_features} outputs of {part.name}, which blocks of {BLOCK} do not"
            f' divide; use --granularity channel, or give --ignore "re:.*{last}"'
        )


def _pattern_of(experts: str) -> str:
    """The value of --ignore that leaves all experts unquantized. experts: name of a module of experts."""
    return f'"re:.*\\.{re.escape(experts.rpartition(".")[2])}\\."'
