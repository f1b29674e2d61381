"""A checkpoint of a few linear layers, as a quantization method stores them, and the layers it becomes."""

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

Make = Callable[[LayerFactory], Linear]
"""Asks for a layer, as a model does."""
Store = Callable[[str, torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
"""Of a layer's name and weight, [out, in] float32: its tensors by what follows "NAME.", and the weight they mean."""


@frozen(kw_only=True)
class StoredLayers:
    """Layers in a file, and how to read them."""

    directory: Path
    tensors: Mapping[str, torch.Tensor]
    meant: Mapping[str, torch.Tensor]
    """[out, in] float64 of each layer: the weight that its tensors stand for."""
    biases: Mapping[str, torch.Tensor]
    """[out] float32 of each layer. They are in the file as long as a layer that is loaded wants them."""
    make_method: Callable[[], QuantMethod[Any]]
    device: str
    dtype: str

    def load(
        self, make: Make, rank: int = 0, ranks: int = 1, changed: Mapping[str, torch.Tensor | None] = {}
    ) -> Linear:
        """What one of so many ranks has of a layer.

        changed: tensors that the file has in place of those stored; None: it lacks it. Skips the test where the method
        refuses to have the layer shared by so many ranks.
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

    def share(self, make: Make, ranks: int) -> list[Linear]:
        """What each of so many ranks has of a layer."""
        return [self.load(make, rank, ranks) for rank in range(ranks)]

    def loaded(self, kernel: LinearKernel) -> dict[str, torch.Tensor]:
        """What a kernel is given to prepare where one rank has it all."""
        return {
            name: (tensor.reshape(1) if not tensor.dim() else tensor).to(self.device, copy=True)
            for name, tensor in self.tensors.items()
            if name in kernel.tensors()
        }

    def product(self, x: torch.Tensor, names: Sequence[str], *, bias: bool = False) -> torch.Tensor:
        """What layers side by side should give: [rows, outputs of all] float64, on the CPU."""
        outs = []
        for name in names:
            out = x.double().cpu() @ self.meant[name].T
            outs.append(out + self.biases[name].double() if bias else out)
        return torch.cat(outs, -1)


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
    """Random layers; sizes: outputs of each, by name. scales: how large the weights of each are."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor] = {}
    for (name, size), scale in zip(sizes.items(), scales, strict=False):
        weight = torch.randn(size, inputs, generator=draw) * (scale * inputs**-0.5)
        stored, weight = store(name, weight)
        assert weight.shape == (size, inputs), f"store() says that {name} means a weight of {list(weight.shape)}"
        tensors |= {f"{name}.{end}": tensor for end, tensor in stored.items()}
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
