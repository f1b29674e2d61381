"""Runs a model one decoder layer at a time, so that memory holds only one layer and its activations.

The layers are those of transformers, where each linear layer is a module with a plain weight that can be replaced, and
a decoder layer can run alone. The engine merges linear layers, repacks weights and writes to a paged cache, and runs
models as a whole. Arithmetic is float32, so that quantization is the only error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.core.errors import CheckpointError
from engine.quantize.kv_cache import KVPeaks
from engine.quantize.source import DecoderLayer, Source


class Inputs:
    """Statistics of a linear layer's inputs, over all tokens of the calibration text."""

    def __init__(self) -> None:
        self.hessian: torch.Tensor | None = None
        """[inputs, inputs] float32: the mean of x x^T."""
        self.peak = 0.0
        """The largest |x|."""
        self._sum: torch.Tensor | None = None
        self._tokens = 0

    @property
    def magnitudes(self) -> torch.Tensor:
        """[inputs] float32: the mean |x|."""
        assert self._sum is not None
        return self._sum / self._tokens

    def add(self, x: torch.Tensor) -> None:
        """x: [..., inputs]."""
        x = x.flatten(0, -2).float()
        if self.hessian is None or self._sum is None:
            self.hessian = torch.zeros((x.shape[1], x.shape[1]), device=x.device)
            self._sum = torch.zeros(x.shape[1], device=x.device)
        before, self._tokens = self._tokens, self._tokens + len(x)
        self.hessian *= before / self._tokens
        self.hessian.addmm_(x.T, x, alpha=1 / self._tokens)
        self._sum += x.abs().sum(0)
        self.peak = max(self.peak, float(x.abs().max()))


class _Enough(Exception):  # noqa: N818  (ends a pass early, and is no error)
    pass


class CalibrationModel:
    """A checkpoint's decoder layers, run over samples of text."""

    def __init__(self, source: Source, device: torch.device) -> None:
        """Raises CheckpointError if the architecture has no `model.layers` in transformers."""
        import transformers

        library: Any = transformers  # without types
        self._source = source
        self.device = device
        try:
            config = library.AutoConfig.from_pretrained(str(source.checkpoint.path), local_files_only=True)
            # What config.json names may not be installed, or not compute the model; None: transformers chooses.
            config._attn_implementation = None
            with torch.device("meta"):
                model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            self._body: Any = model.model.eval()
            self._layers: Sequence[nn.Module] = self._body.layers
            self._body.rotary_emb = type(self._body.rotary_emb)(config=config).to(device)
            # Checkpoints lack the buffers of embeddings, as Gemma 3's scale. This computes them; the weight stays meta.
            buffers = self._body.embed_tokens._buffers
            buffers.update({name: torch.empty_like(buffer, device=device) for name, buffer in buffers.items()})
            model._init_weights(self._body.embed_tokens)
        except Exception as error:  # transformers raises errors of any class for unknown architectures
            raise CheckpointError(
                f"text cannot be run through {source.checkpoint.path} layer by layer: {type(error).__name__}: {error};"
                " methods that need no calibration text (fp8, int8, rtn) may work"
            ) from error
        self._arguments: list[dict[str, Any]] = []

    @torch.no_grad()
    def embed(self, samples: torch.Tensor) -> list[torch.Tensor]:
        """samples: [samples, tokens] -> the inputs of the first decoder layer, [1, tokens, hidden_size] each."""
        embedding = self._body.embed_tokens
        weight = self._source.read("model.embed_tokens.weight").float().to(self.device)
        embedding.load_state_dict({"weight": weight}, assign=True)
        self._body.norm.to_empty(device=self.device)  # its result is discarded
        self._arguments = [{} for _ in self._layers]
        hidden: list[torch.Tensor] = []

        def record(number: int, states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            self._arguments[number] = arguments
            if number == 0:
                hidden.append(states)
            return states

        # The model computes the masks and angles of each layer; they are the same for all samples.
        for number, layer in enumerate(self._layers):
            layer.forward = partial(record, number)
        for sample in samples.to(self.device):
            self._body(input_ids=sample[None], use_cache=False)
        for layer in self._layers:
            del layer.forward
        embedding.to("meta")
        self._body.norm.to("meta")
        return hidden

    def load(self, layer: DecoderLayer, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        """Load these tensors (by names within the layer) into a decoder layer's module, in float32 on the device.

        Raises CheckpointError if their names differ from those in transformers.
        """
        module = self.module(layer)
        try:
            module.load_state_dict(
                {
                    name: tensor.to(self.device, torch.float32, copy=True)
                    for name, tensor in tensors.items()
                    if not name.endswith("rotary_emb.inv_freq")  # in older checkpoints, not read
                },
                assign=True,
            )
        except RuntimeError as error:
            raise CheckpointError(
                f"the tensors of {layer.prefix} are not those that transformers expects: {error}; methods that need no"
                " calibration text (fp8, int8, rtn) may work"
            ) from error
        return module

    def module(self, layer: DecoderLayer) -> nn.Module:
        """The module of a decoder layer. It has weights between `load` and `drop`."""
        return self._layers[layer.number]

    def drop(self, layer: DecoderLayer) -> None:
        """Free the weights of a decoder layer."""
        self._layers[layer.number].to("meta")

    @torch.no_grad()
    def run(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        module: nn.Module | None = None,
        cache: KVPeaks | None = None,
    ) -> torch.Tensor:
        """Run one sample through a decoder layer (or another module in its place). cache: records keys and values."""
        chosen: Callable[..., torch.Tensor] = module or self._layers[layer.number]
        arguments = self._arguments[layer.number]
        return chosen(hidden, **(arguments if cache is None else {**arguments, _cache_name(arguments): cache}))

    def advance(self, layer: DecoderLayer, hidden: list[torch.Tensor], cache: KVPeaks | None = None) -> None:
        """Run all samples through a decoder layer, in place."""
        for number, states in enumerate(hidden):
            hidden[number] = self.run(layer, states, cache=cache)

    def watch(self, layer: DecoderLayer, names: Sequence[str], hidden: Sequence[torch.Tensor]) -> dict[str, Inputs]:
        """Measure the inputs of linear layers of a decoder layer. Runs the layer up to the last of them."""
        module = self.module(layer)
        found = {name: Inputs() for name in names}
        waiting: set[str] = set()

        def look(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            found[name].add(inputs[0])
            waiting.discard(name)
            if not waiting:
                raise _Enough

        handles = [module.get_submodule(name).register_forward_pre_hook(partial(look, name)) for name in names]
        try:
            for states in hidden:
                waiting.update(names)
                try:
                    self.run(layer, states)
                except _Enough:
                    continue
        finally:
            for handle in handles:
                handle.remove()
        return found


def _cache_name(arguments: Mapping[str, Any]) -> str:
    """The name of a decoder layer's argument for a cache, which transformers has renamed in 5.24."""
    return "cache" if "cache" in arguments else "past_key_values"
