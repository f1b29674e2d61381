"""Conformance of attention backends that norm, rotate and cache the new tokens themselves (`rotate_and_forward`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from engine.core.attention import AttentionBackend, AttentionPair, AttentionSpec, HeadRotation
from engine.core.quant import FLOAT8
from engine.testing.attention_cases import BATCHES, Case, Lengths, invalidate, pack, unpack

if TYPE_CHECKING:
    from engine.core.attention import KVPool

ROTATIONS = ("rotated", "interleaved", "half of each head", "after a norm", "only the norm", "as they are")


class RotationConformance(ABC):
    """Compares `rotate_and_forward` with norm, rotation and cache write by PyTorch, and then `forward`."""

    backend: ClassVar[type[AttentionBackend[Any, Any]] | AttentionPair]

    @abstractmethod
    def spec(self, **changes: Any) -> AttentionSpec:
        """The shapes of the test's model, with changes."""

    @abstractmethod
    def make(self, spec: AttentionSpec, lengths: Lengths, seed: int = 0) -> Case:
        """A batch of random keys and values with sequences of these lengths."""

    @abstractmethod
    def _skip_if_refused(self, spec: AttentionSpec) -> None: ...

    @abstractmethod
    def _backend(self, spec: AttentionSpec, case: Case) -> AttentionBackend[Any, Any]: ...

    @abstractmethod
    def _close(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None: ...

    @pytest.mark.parametrize("changes", [{}, {"kv_dtype": FLOAT8}, {"softcap": 2.0, "sinks": (True, False)}], ids=str)
    @pytest.mark.parametrize("rotation", ROTATIONS)
    def test_rotate_and_forward(self, rotation: str, changes: dict[str, Any]) -> None:
        """The same results, and the same keys and values in the pool, as if core does all of that before `forward`."""
        spec = self.spec(sliding_windows=(8, None), **changes)
        self._skip_if_refused(spec)
        answered = False
        for name in ("decode", "one token", "mixed"):
            case = self.make(spec, BATCHES[name])
            answered |= self._check_rotation(spec, case, rotation)
        if not answered:
            pytest.skip("leaves norm, rotation and the write to the cache to core")

    def test_rotate_and_forward_of_rows_that_share_a_sequence(self) -> None:
        """A row sees the keys of the rows before it, which the same call may have to write."""
        spec = self.spec()
        self._skip_if_refused(spec)
        case = self.make(spec, ((38, 4),))
        batch, device = case.batch, case.batch.tokens.device
        contexts, tables = np.arange(39, 43, dtype=np.int32), np.repeat(batch.block_tables_host, 4, 0)
        rows = attrs.evolve(
            batch,
            query_starts=torch.arange(5, dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, device=device),
            block_tables=torch.tensor(tables, device=device),
            num_decodes=4,
            query_lens_host=np.ones(4, np.int32),
            context_lens_host=contexts,
            block_tables_host=tables,
            rows_share_sequences=True,
        )
        if not self._check_rotation(spec, attrs.evolve(case, batch=rows), "rotated"):
            pytest.skip("leaves norm, rotation and the write to the cache to core")

    def _check_rotation(self, spec: AttentionSpec, case: Case, kind: str) -> bool:
        """Compare all layers of a batch; return whether the backend has computed any."""
        backend, batch, pool = self._backend(spec, case), case.batch, case.pool
        answered = False
        with torch.inference_mode():
            plan = backend.plan(batch)
            for layer, inputs in enumerate(case.inputs):
                packed = pack(spec, inputs)
                rotation = make_rotation(spec, kind, packed)
                q, k, v = unpack(spec, rotate_heads(spec, packed, rotation))
                pool.write(layer, k, v, batch.slots)
                expected = backend.forward(layer, q, k, v, plan).double().cpu()
                keys, values = _copy(pool, layer)
                invalidate(pool, layer, batch.slots)
                before, given = _copy(pool, layer), packed.flatten(1).clone()
                out = backend.rotate_and_forward(layer, given, rotation, plan)
                after = _copy(pool, layer)
                if out is None:
                    unchanged = (*before, packed.flatten(1))
                    torch.testing.assert_close((*after, given), unchanged, rtol=0, atol=0, equal_nan=True)
                    pool.write(layer, k, v, batch.slots)
                    continue
                answered = True
                self._close(out, expected, f"rotate_and_forward, layer {layer}, {kind}")
                # A key may be rounded otherwise, since norm and rotation here round in between or add in another order.
                step = 2**-3 if pool.is_float8 else 2**-7
                torch.testing.assert_close(after[0], keys, rtol=step, atol=step, equal_nan=True)
                torch.testing.assert_close(after[1], values, rtol=0, atol=0, equal_nan=True)
        return answered


def make_rotation(spec: AttentionSpec, kind: str, packed: torch.Tensor) -> HeadRotation:
    """A rotation of ROTATIONS for these heads, with random angles and weights."""
    draw = torch.Generator().manual_seed(0)
    size = spec.head_dim // (4 if kind == "half of each head" else 2)
    angles = torch.rand(len(packed), size, generator=draw).mul(6).to(packed.device)
    weight = torch.rand(spec.num_heads + spec.num_kv_heads, spec.head_dim, generator=draw).add(0.5).to(packed)
    return HeadRotation(
        cos=None if kind in ("only the norm", "as they are") else angles.cos(),
        sin=None if kind in ("only the norm", "as they are") else angles.sin(),
        norm_weight=weight if kind in ("after a norm", "only the norm") else None,
        norm_eps=1e-5,
        interleaved=kind == "interleaved",
    )


def rotate_heads(spec: AttentionSpec, packed: torch.Tensor, rotation: HeadRotation) -> torch.Tensor:
    """Norm and rotate queries and keys by their definition. packed: [tokens, heads, head_dim], values included."""
    num_qk = spec.num_heads + spec.num_kv_heads
    x = packed[:, :num_qk].double()
    if rotation.norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rotation.norm_eps) * rotation.norm_weight.double()
    if rotation.cos is not None and rotation.sin is not None:
        c, s = rotation.cos.double()[:, None], rotation.sin.double()[:, None]
        size = 2 * c.shape[-1]
        turning, rest = x[..., :size], x[..., size:]
        first, second = (turning[..., ::2], turning[..., 1::2]) if rotation.interleaved else turning.chunk(2, -1)
        turned = first * c - second * s, second * c + first * s
        turning = torch.stack(turned, -1).flatten(-2) if rotation.interleaved else torch.cat(turned, -1)
        x = torch.cat((turning, rest), -1)
    return torch.cat((x.to(packed.dtype), packed[:, num_qk:]), 1)


def _copy(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, as the pool holds them, in float32."""
    return pool.keys[layer].float().clone(), pool.values[layer].float().clone()
