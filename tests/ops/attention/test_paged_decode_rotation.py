"""Decode attention that norms, rotates and caches new tokens itself, against float64 and against separate kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from attrs import define, evolve

from engine.core.attention.base import AttentionSpec
from engine.ops.attention.paged_decode import paged_decode
from engine.ops.attention.paged_decode_config import DecodeConfig, decode_configs
from engine.ops.attention.paged_decode_merge import DecodeWorkspace
from engine.ops.attention.paged_decode_rotation import NewTokens, rotates_within_decode
from engine.ops.attention.rope_and_cache import rotate_and_write
from engine.testing.attention_cases import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
INTERPRETED = triton.knobs.runtime.interpret
SMALL = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2)
LENGTHS = (1, 16, 17, 100, 33, 5)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HALF = torch.float16 if INTERPRETED else torch.bfloat16


@define(slots=False, kw_only=True)
class Case:
    """Projections of the new token of each sequence, and a cache that holds NaN in all slots that are not older."""

    lengths: Sequence[int] = LENGTHS
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    rotated: bool = True
    interleaved: bool = False
    normed: bool = True
    has_sinks: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(0)
        heads, kv_heads = self.heads
        kv_dtype = self.kv_dtype or self.dtype
        counts = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(counts) + 1).tolist()
        shape = (sum(counts) + 1, self.block_size, kv_heads, self.dim)
        pool = [torch.full(shape, torch.nan) for _ in range(2)]
        tables = torch.full((len(counts), max(counts)), order.pop(), dtype=torch.int32)
        slots = []
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            at = torch.arange(0 if self.window is None else max(length - self.window, 0), length - 1)
            blocks, offsets = tables[row][at // self.block_size].long(), at % self.block_size
            for part in pool:
                part[blocks, offsets] = torch.randn(len(at), kv_heads, self.dim).to(kv_dtype).float()
            last = length - 1
            slots.append(int(tables[row, last // self.block_size]) * self.block_size + last % self.block_size)
        self.tables, self.slots = tables.to(DEVICE), torch.tensor(slots, device=DEVICE)
        self.context_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.keys, self.values = (part.to(kv_dtype).to(DEVICE) for part in pool)
        # Exact in float8, since the interpreter rounds wrongly.
        qkv = torch.randn(len(counts), heads + 2 * kv_heads, self.dim)
        if INTERPRETED and kv_dtype.itemsize == 1:
            qkv = (qkv * 4).round().clamp(-8, 8)
            qkv[:, heads : heads + kv_heads] *= self.key_scale
            qkv[:, heads + kv_heads :] *= self.value_scale
        self.qkv = qkv.flatten(1).to(self.dtype).to(DEVICE)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        if self.rotated:
            angles = torch.rand(len(counts), self.dim // 2, device=DEVICE) * 6
            self.cos, self.sin = angles.cos(), angles.sin()
        weight = torch.rand(heads + kv_heads, self.dim, device=DEVICE) + 0.5
        self.weight = weight.to(self.dtype) if self.normed else None
        self.sinks = torch.linspace(-4.0, 8.0, heads, device=DEVICE) if self.has_sinks else None

    def run(self, programs: int, config: DecodeConfig = SMALL, *, fused: bool = True) -> Any:
        """The attention of each sequence, and the cache's keys and values afterwards."""
        keys, values, qkv = self.keys.clone(), self.values.clone(), self.qkv.clone()
        new = NewTokens(
            slots=self.slots,
            cos=self.cos,
            sin=self.sin,
            weight=self.weight,
            eps=1e-5,
            key_scale=self.key_scale,
            interleaved=self.interleaved,
        )
        if not fused:
            rotate_and_write(
                qkv, keys, values, self.slots, self.cos, self.sin, self.heads[0], self.weight, 1e-5, self.key_scale,
                self.value_scale, interleaved=self.interleaved,
            )  # fmt: skip
        q = qkv.view(len(qkv), -1, self.dim)[:, : self.heads[0]]
        out = torch.full(q.shape, -7.0, dtype=self.dtype, device=DEVICE)
        workspace = DecodeWorkspace.make(programs, *self.heads, self.dim, DEVICE)
        workspace.acc.fill_(torch.nan)
        workspace.stats.fill_(torch.nan)
        paged_decode(
            q,
            keys,
            values,
            self.tables,
            self.context_lens,
            out,
            num_sequences=len(qkv),
            scale=self.dim**-0.5 * self.key_scale,
            softcap=self.softcap,
            window=self.window,
            value_scale=self.value_scale,
            sinks=self.sinks,
            workspace=workspace,
            config=config,
            new=new if fused else None,
        )
        assert not workspace.arrivals.any()
        if fused:
            assert torch.equal(qkv, self.qkv), "the projections were changed"
        return out, keys, values

    def check(self, programs: int = 5, config: DecodeConfig = SMALL) -> None:
        """Compare with separate kernels: the same cache, and the same attention up to the order of a sum."""
        out, keys, values = self.run(programs, config)
        other, other_keys, other_values = self.run(programs, config, fused=False)
        assert torch.equal(values.float().nan_to_num(999), other_values.float().nan_to_num(999))
        # The sum of a norm may be rounded otherwise, and so the key.
        key_tolerance = 2**-3 if keys.dtype.itemsize == 1 else TOLERANCE[keys.dtype]
        torch.testing.assert_close(keys.float(), other_keys.float(), rtol=key_tolerance, atol=1e-5, equal_nan=True)
        changed = (keys.float() != other_keys.float()) & ~keys.float().isnan()
        assert changed.float().mean() < 0.01
        error = (out.double() - other.double()).norm() / other.double().norm()
        assert error <= TOLERANCE[self.dtype]
        expected = self.expected(other_keys, other_values)
        error = (out.double().cpu() - expected).norm() / expected.norm()
        assert error <= TOLERANCE[self.dtype] * (1.5 if self.kv_dtype is not None else 1)

    def expected(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention by its definition, over the keys and values of a cache: [sequences, heads, dim] float64."""
        heads, kv_heads = self.heads
        q = self.qkv.view(len(self.qkv), -1, self.dim)[:, :heads].double().cpu()
        if self.weight is not None:
            q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight[:heads].double().cpu()
        if self.cos is not None and self.sin is not None:
            c, s = self.cos.double().cpu()[:, None], self.sin.double().cpu()[:, None]
            first, second = (q[..., ::2], q[..., 1::2]) if self.interleaved else q.chunk(2, -1)
            turned = first * c - second * s, second * c + first * s
            q = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        q = q.to(self.dtype)
        spec = AttentionSpec(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            dtype="float32",
            kv_dtype="float32",
            block_size=self.block_size,
            max_len=max(self.lengths),
            sliding_windows=(self.window,),
            softcap=self.softcap,
        )
        outs = []
        for row, length in enumerate(self.lengths):
            at = torch.arange(length)
            slots = self.tables[row].cpu()[at // self.block_size].long() * self.block_size + at % self.block_size
            k, v = (part.double().cpu().flatten(0, 1)[slots] for part in (keys, values))
            sinks = None if self.sinks is None else self.sinks.cpu()
            one = dense_attention(q[row : row + 1], k * self.key_scale, v * self.value_scale, spec, self.window, sinks)
            outs.append(one)
        return torch.cat(outs)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_decode_rotates_and_caches_new_tokens_across_ranges(programs: int) -> None:
    Case().check(programs)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rotated", "interleaved"), [(False, False), (True, False), (True, True)])
def test_decode_takes_new_tokens_with_and_without_norm_and_rotation(
    normed: bool, rotated: bool, interleaved: bool
) -> None:
    Case(normed=normed, rotated=rotated, interleaved=interleaved).check()


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_decode_takes_new_tokens_within_a_window(window: int) -> None:
    Case(lengths=(1, 90, 200, 16, 17), window=window).check()


@pytest.mark.parametrize("start_tiles", [1, 2, 5])
@pytest.mark.parametrize("programs", [1, 3, 11])
def test_decode_takes_new_tokens_where_starts_of_sequences_count(programs: int, start_tiles: int) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, start_tiles=start_tiles)
    Case(window=50).check(programs, config)


def test_decode_takes_new_tokens_with_a_soft_cap_and_sinks() -> None:
    Case(softcap=1.5, has_sinks=True).check()


@pytest.mark.parametrize("group", [1, 3, 8, 15, 20])
def test_decode_takes_new_tokens_of_groups_of_any_size(group: int) -> None:
    Case(lengths=(50, 9), heads=(2 * group, 2)).check(3)


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_decode_takes_new_tokens_of_heads_of_powers_of_two(dim: int) -> None:
    Case(lengths=(50, 9), dim=dim).check(3)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_decode_takes_new_tokens_for_blocks_smaller_and_larger_than_tiles(block_size: int) -> None:
    Case(lengths=(50, 130), block_size=block_size).check(3)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_decode_takes_new_tokens_in_half_precision(dtype: torch.dtype) -> None:
    Case(dtype=dtype).check(3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "fold", "dim"), [((4, 4), 2, 64), ((8, 4), 4, 16), ((12, 4), 2, 32)])
@pytest.mark.parametrize("programs", [1, 4])
def test_decode_takes_new_tokens_of_folded_heads(
    programs: int, heads: Any, fold: int, dim: int, interleaved: bool
) -> None:
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, fold=fold)
    Case(heads=heads, dim=dim, dtype=HALF, has_sinks=True, interleaved=interleaved).check(programs, config)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (64, 8), (8, 1)])
def test_decode_takes_new_tokens_at_real_sizes(heads: Any, dim: int, normed: bool) -> None:
    memory = torch.cuda.get_device_properties(DEVICE).shared_memory_per_multiprocessor
    for limit, config in decode_configs(dim, 2, memory, heads):
        if not rotates_within_decode(evolve(config, rotates=True), heads, dim, dim, torch.bfloat16):
            continue
        if config.programs_per_sm > 1:
            continue
        count = max(1, int(min(limit, 40)))
        case = Case(
            lengths=[700 - 97 * i % 700 for i in range(count)],
            heads=heads,
            dim=dim,
            dtype=torch.bfloat16,
            normed=normed,
        )
        case.check(config.programs_per_head(heads[1], torch.device(DEVICE)), config)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "can"),
    [
        ((32, 8), 128, 128, True),
        ((15, 1), 64, None, True),
        ((16, 1), 64, None, False),
        ((20, 1), 64, 64, True),
        ((32, 8), 128, 64, False),
        ((32, 8), 96, 96, False),
        ((32, 8), 80, None, False),
    ],
)
def test_heads_rotate_within_decode_where_all_of_a_power_of_two_do(
    heads: Any, head_dim: int, rotary_dim: int | None, can: bool
) -> None:
    config = evolve(SMALL, rotates=True)
    assert rotates_within_decode(config, heads, head_dim, rotary_dim, torch.bfloat16) == can
    assert not rotates_within_decode(config, heads, head_dim, rotary_dim, torch.float8_e4m3fn)
    assert not rotates_within_decode(SMALL, heads, head_dim, rotary_dim, torch.bfloat16)
