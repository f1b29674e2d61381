"""Quantized checkpoints made by hand from tiny float32 ones, each with its dequantized twin; no code of the loader's.

A packer takes a float32 weight [out, in] of a module, and gives its tensors, by suffix, and the weight they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Packer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]

GRID = torch.tensor(
    [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
)
"""float8 (e4m3) numbers by code, from 0 to 448."""


def fp8_words(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes nearest to values within +-448, as bytes written by hand, and the numbers they mean."""
    code = torch.bucketize(values.abs(), (GRID[1:] + GRID[:-1]) / 2)
    negative = values < 0
    words = (code + 128 * negative).to(torch.uint8).view(torch.float8_e4m3fn)
    return words, torch.where(negative, -GRID[code], GRID[code])


def fp8_per_tensor(
    scale_name: str = "weight_scale", shape: Any = (1,), input_scale: Any = None, input_name: str = "input_scale"
) -> Packer:
    def pack(module: Any, weight: Any) -> Any:
        scale = weight.abs().max() / 448
        words, numbers = fp8_words(weight / scale)
        tensors = {"weight": words, scale_name: scale.reshape(shape)}
        if input_scale is not None:
            tensors[input_name] = torch.full(shape, input_scale * (1 + len(module) % 3))
        return tensors, numbers * scale

    return pack


def fp8_per_channel(module: Any, weight: Any) -> Any:
    scale = weight.abs().amax(1, keepdim=True) / 448
    words, numbers = fp8_words(weight / scale)
    return {"weight": words, "weight_scale": scale}, numbers * scale


def fp8_blocks(scale_name: Any, powers: bool = False) -> Packer:
    def pack(module: Any, weight: Any) -> Any:
        rows, columns = weight.shape
        words, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
                scale = weight[block].abs().max() / 448
                scale = torch.exp2(scale.log2().ceil()) if powers else scale
                scales[i, j] = scale
                words[block], found = fp8_words(weight[block] / scale)
                numbers[block] = found * scale
        return {"weight": words, scale_name: scales}, numbers

    return pack


def int8_per_channel(module: Any, weight: Any) -> Any:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round()
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def with_tensors(packer: Packer, more: Callable[[str], Tensors]) -> Packer:
    """The same with tensors added."""

    def pack(module: Any, weight: Any) -> Any:
        tensors, numbers = packer(module, weight)
        return {**tensors, **more(module)}, numbers

    return pack


def quantized(
    source: Path,
    target: Path,
    packer: Packer,
    config: Mapping,
    *,
    unquantized: Callable[[str], bool] = lambda name: False,
    head: bool = False,
) -> tuple[Path, Path]:
    """The checkpoint at `source` quantized, and its twin with the weights that the codes stand for.

    head: quantize the output layer too.
    """
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_projection = module.endswith("_proj") or (head and module == "lm_head")
        if is_projection and tensor.dim() == 2 and not unquantized(module):
            tensors, weight = packer(module, tensor)
            stored |= {f"{module}.{suffix}": made.contiguous() for suffix, made in tensors.items()}
            meant[name] = weight.contiguous()
        else:
            stored[name] = meant[name] = tensor
    paths = target / "quantized", target / "meant"
    for path, tensors in zip(paths, (stored, meant), strict=True):
        copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    file = paths[0] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return paths


def compressed(form: str, weights: Mapping, inputs: Mapping | None, **more: Any) -> dict:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def number(kind: str, strategy: str, *, dynamic: bool = False, **more: Any) -> dict:
    """A table of quantization arguments."""
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}
