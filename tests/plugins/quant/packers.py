"""Writes checkpoints as other programs do, with nothing of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FILE = "model.safetensors"
PROJECTIONS = ("_proj", "_proj_with_mqa", "c_fc", ".w1", ".w2", ".w3")
"""How the names of projections end."""


def words_along_last(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """[rows, columns] -> [rows, ceil(columns * bits / 32)] int32; order: which column a word's i-th place is."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    out = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        found = numbers[:, column::per_word].astype(np.uint32)  # a last word that is not full may lack it
        out[:, : found.shape[1]] |= found << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


class Weight:
    """A random quantized weight, and what it means."""

    def __init__(
        self,
        outputs: Any,
        inputs: Any,
        *,
        bits: int = 4,
        group_size: int = 32,
        symmetric: bool = True,
        ordered: bool = False,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        self.bits = bits
        self.shape = (outputs, inputs)
        self.group_of = np.arange(inputs) // size
        if ordered:
            self.group_of = random.permutation(self.group_of)
        self.values = random.integers(0, 2**bits, (outputs, inputs))
        self.zeros = np.full((groups, outputs), 2 ** (bits - 1))
        if not symmetric:
            self.zeros = random.integers(0, 2**bits, (groups, outputs))
        self.scales = torch.from_numpy((random.random((groups, outputs)) + 0.5) * 0.8 / 2**bits).to(torch.float16)

    @property
    def plain(self) -> torch.Tensor:
        """[outputs, inputs] float32."""
        centred = torch.from_numpy(self.values - self.zeros[self.group_of].T).float()
        return centred * self.scales.float()[self.group_of].T

    def gptq(self, *, version: int = 1, stored_order: bool = True) -> dict[str, torch.Tensor]:
        """Version 1 stores zero points less one."""
        stored = (self.zeros - 1) % 2**self.bits if version == 1 else self.zeros
        tensors = {
            "qweight": words_along_last(self.values, self.bits).T.contiguous(),
            "qzeros": words_along_last(stored, self.bits),
            "scales": self.scales,
        }
        if stored_order:
            tensors["g_idx"] = torch.from_numpy(self.group_of.astype(np.int32))
        return tensors

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words_along_last(self.values.T, 4, AWQ_ORDER),
            "qzeros": words_along_last(self.zeros, 4, AWQ_ORDER),
            "scales": self.scales,
        }

    def compressed(self, *, symmetric: bool, ordered: bool) -> dict[str, torch.Tensor]:
        tensors = {
            "weight_packed": words_along_last(self.values, self.bits),
            "weight_scale": self.scales.T.contiguous(),
            "weight_shape": torch.tensor(self.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_along_last(self.zeros.T.T, self.bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = torch.from_numpy(self.group_of.astype(np.int32))
        return tensors


def quantize_checkpoint(source: Path, target: Path, quantization: dict, make: Any, unquantized: Any = ()) -> None:
    """Replace each projection's weight by random numbers: as stored in `target`, as they are in `source`.

    make: name and shape -> (tensors by the end of their name, plain weight).
    """
    plain = load_file(source / FILE)
    stored = dict(plain)
    for name, tensor in list(plain.items()):
        module = name.removesuffix(".weight")
        if not module.endswith(PROJECTIONS) or module in unquantized:
            continue
        packed, weight = make(module, tuple(tensor.shape))
        plain[name] = weight
        del stored[name]
        stored |= {f"{module}.{end}": value for end, value in packed.items()}
    _write(source, target, quantization, plain, stored)


def quantize_experts_to_mxfp4(source: Path, target: Path, quantization: dict) -> None:
    """Replace the experts of a gpt-oss checkpoint by random numbers, as `quantize_checkpoint`."""
    plain = load_file(source / FILE)
    stored = dict(plain)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        nibbles = torch.randint(0, 16, (experts, outputs, inputs), generator=torch.Generator().manual_seed(len(name)))
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), generator=torch.Generator().manual_seed(1))
        stored[f"{name}_blocks"] = (
            (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).to(torch.uint8).view(experts, outputs, inputs // 32, 16)
        )
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        weight = numbers[nibbles] * 2.0 ** (scales - 127).repeat_interleave(32, 2)
        plain[name] = weight.transpose(1, 2).contiguous()
    _write(source, target, quantization, plain, stored)


def _write(
    source: Path, target: Path, quantization: dict, plain: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]
) -> None:
    """Write `plain` to `source`, and `stored` to `target` with the files next to it."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(plain, source / FILE, {"format": "pt"})
    save_file(stored, target / FILE, {"format": "pt"})
