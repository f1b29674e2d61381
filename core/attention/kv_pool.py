"""Tensors of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.attention.base import AttentionSpec
from engine.core.quant.float8 import FLOAT8, UNSCALED, KVScales, quantize_float8
from engine.core.weights.host_memory import zeroed_tensor


class KVPool:
    """The KV cache's tensors: `keys` and `values`, per layer [num_blocks + 1, block_size, kv_heads, head_dim].

    The last block is scratch: padding is written there and never read. Values may have another size than keys; those of
    a latent cache are views of the keys. `scales` has the KVScales of each layer.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        device: torch.device | str,
        scales: Sequence[KVScales] = (),
        shared: KVPool | None = None,
    ) -> None:
        """Allocate the tensors. scales: per layer of a float8 cache; empty: all scales are 1. shared: the pool of
        another cache group, with at least as many layers and blocks of the same size, whose memory this one uses too.
        Raises ValueError for a latent float8 cache: values are parts of keys, so they cannot have a scale of their own.
        """
        if spec.latent and spec.kv_dtype == FLOAT8:
            raise ValueError(f"a latent cache cannot be in {FLOAT8}")
        self.num_blocks = num_blocks
        self.block_size = spec.block_size
        self.is_float8 = spec.kv_dtype == FLOAT8
        """Whether the cache holds quantized values, which `scales` belong to."""
        if scales and (not self.is_float8 or len(scales) != spec.num_layers):
            raise ValueError(f"{len(scales)} scales for {spec.num_layers} layers in {spec.kv_dtype}")
        self.scales = tuple(scales) or (UNSCALED,) * spec.num_layers
        dtype = getattr(torch, spec.kv_dtype)
        rows = (num_blocks + 1, spec.block_size, spec.num_kv_heads)

        def tensor(size: int) -> torch.Tensor:
            if torch.device(device).type == "cpu":
                return zeroed_tensor((*rows, size), dtype, device)
            return torch.empty((*rows, size), dtype=dtype, device=device)

        def tensors(size: int, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if others:
                return [each.view(*rows, size) for each in others[: spec.num_layers]]
            return [tensor(size) for _ in range(spec.num_layers)]

        self.keys: list[torch.Tensor] = tensors(spec.head_dim, () if shared is None else shared.keys)
        self.values: list[torch.Tensor] = (
            [keys[..., : spec.output_dim] for keys in self.keys]
            if spec.latent
            else tensors(spec.output_dim, () if shared is None else shared.values)
        )
        self.output_dim = spec.output_dim
        """Size of a value and of a head's output."""
        self._is_latent = spec.latent
        self._flat_keys = [self._flat(tensor) for tensor in self.keys]
        self._flat_values = [] if spec.latent else [self._flat(tensor) for tensor in self.values]

    @property
    def scratch_block(self) -> int:
        """Number of the block for padding."""
        return self.num_blocks

    @staticmethod
    def bytes_per_block(spec: AttentionSpec) -> int:
        """Bytes of one block, keys and values of all layers."""
        dtype: torch.dtype = getattr(torch, spec.kv_dtype)
        return spec.num_layers * spec.block_size * sum(spec.numbers_per_token) * dtype.itemsize

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v: [tokens, kv_heads, size] at `slots`: [tokens] int64, block * block_size + offset.

        A latent cache stores k alone.
        """
        if self._is_latent:
            self._flat_keys[layer].index_copy_(0, slots, k.to(self._flat_keys[layer].dtype))
            return
        keys, values = self._flat_keys[layer], self._flat_values[layer]
        if self.is_float8:
            scales = self.scales[layer]
            k, v = quantize_float8(k, scales.key).view(keys.dtype), quantize_float8(v, scales.value).view(keys.dtype)
        keys.index_copy_(0, slots, k.to(keys.dtype))
        values.index_copy_(0, slots, v.to(keys.dtype))

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor by slots; float8 as bytes, because torch does not index_copy_ float8 on a CPU."""
        flat = tensor.flatten(0, 1)
        return flat.view(torch.uint8) if self.is_float8 else flat
