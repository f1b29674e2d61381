"""A checkpoint with a few linear layers, stored as a quantization method does, and the layers loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import save_file

from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory, Linear
from engine.core.quant import LinearKernel, QuantMethod
from engine.core.weights import Checkpoint, SafetensorsSource, load_weights
from engine.testing.ranks import LoneRank

ROWS = (1, 2, 17, 64)
"""Numbers of rows of inputs that layers are tested with."""
Make = Callable[[LayerFactory], Linear]
"""Makes a layer, as a model does."""
Store = Callable[[str, torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
"""(name, weight [out, in] float32) -> the layer's tensors, by what follows "NAME.", and the weight that they
represent."""


@frozen(kw_only=True)
class StoredLayers:
    """Stored layers, and how to load them."""

    directory: Path
    tensors: Mapping[str, torch.Tensor]
    meant: Mapping[str, torch.Tensor]
    """[out, in] float64 of each layer: the weight that its tensors represent."""
    biases: Mapping[str, torch.Tensor]
    """[out] float32 of each layer. Written to the file only if the loaded layer has a bias."""
    make_method: Callable[[], QuantMethod[Any]]
    device: str
    dtype: str

    def load(
        self, make: Make, rank: int = 0, ranks: int = 1, changed: Mapping[str, torch.Tensor | None] = {}
    ) -> Linear:
        """Load one rank's shard of a layer.

        changed: tensors that replace those stored; None: the tensor is missing. Skips the test where the method refuses
        to shard the layer over this many ranks.
        """
        layers = LayerFactory(
            dtype=self.dtype, device=self.device, quant=self.make_method(), group=LoneRank(rank, ranks)
        )
        try:
            layer = make(layers)
        except CheckpointError as error:
            if ranks == 1:
                raise
            pytest.skip(str(error))
        names = [part.name for part in layer.spec.parts]
        tensors: dict[str, torch.Tensor | None] = {
            name: tensor for name, tensor in self.tensors.items() if name.rpartition(".")[0] in names
        }
        if layer.spec.bias:
            tensors |= {f"{name}.bias": self.biases[name] for name in names}
        tensors |= changed
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        (self.directory / "config.json").write_text("{}")
        save_file(kept, self.directory / "model.safetensors")
        with torch.inference_mode():
            load_weights(layers, SafetensorsSource(Checkpoint.open(self.directory)))
        return layer

    def shard(self, make: Make, ranks: int) -> list[Linear]:
        """Load all ranks' shards of a layer."""
        return [self.load(make, rank, ranks) for rank in range(ranks)]

    def loaded(self, kernel: LinearKernel) -> dict[str, torch.Tensor]:
        """The tensors that a kernel of one rank is given to prepare."""
        return {
            name: (tensor.reshape(1) if not tensor.dim() else tensor).to(self.device, copy=True)
            for name, tensor in self.tensors.items()
            if name in kernel.tensors()
        }

    def product(self, x: torch.Tensor, names: Sequence[str], *, bias: bool = False) -> torch.Tensor:
        """The exact product of concatenated layers: [rows, outputs of all] float64, on the CPU."""
        outs = []
        for name in names:
            out = x.double().cpu() @ self.meant[name].T
            outs.append(out + self.biases[name].double() if bias else out)
        return torch.cat(outs, -1)


def whole_names(layer: str, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that store() returned for a layer, by their names in a checkpoint."""
    for name in stored:
        end = name.removeprefix(f"{layer}.")
        assert name == end, f"store() names a tensor of layer {layer!r} {name!r}; name it by what follows: {end!r}"
    return {f"{layer}.{end}": tensor for end, tensor in stored.items()}


def store_layers(
    directory: Path,
    sizes: Mapping[str, int],
    inputs: int,
    store: Store,
    make_method: Callable[[], QuantMethod[Any]],
    *,
    scales: Sequence[float],
    device: str,
    dtype: str,
) -> StoredLayers:
    """Store random layers. sizes: outputs of each, by name. scales: standard deviations of their weights, up to a
    common factor."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor] = {}
    for (name, size), scale in zip(sizes.items(), scales, strict=False):
        weight = torch.randn(size, inputs, generator=draw) * (scale * inputs**-0.5)
        stored, weight = store(name, weight)
        assert weight.shape == (size, inputs), f"store() represents {name} by a weight of {list(weight.shape)}"
        tensors |= whole_names(name, stored)
        meant[name] = weight.double()
        biases[name] = torch.randn(size, generator=draw) * scale
    return StoredLayers(
        directory=directory,
        tensors=tensors,
        meant=meant,
        biases=biases,
        make_method=make_method,
        device=device,
        dtype=dtype,
    )
