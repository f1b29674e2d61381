"""Compares a prefill kernel on random keys and values with the definition of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from engine.core.attention.base import AttentionSpec
from engine.ops.attention.float8_tiles import TILE, gather_tiles
from engine.ops.attention.paged_prefill import paged_prefill, prefill_order, prefill_tiles
from engine.ops.attention.paged_prefill_config import PrefillConfig
from engine.ops.attention.persistent_float8 import BLOCK_M, float8_prefill
from engine.ops.attention.prefill_schedule import prefill_schedule
from engine.ops.common.launch import num_sms
from engine.testing.attention_cases import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
BLOCK_SIZE = 16
SMALL = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FLOAT8_TOLERANCE = 1e-2
"""Of both types: in float16, one query rounded otherwise makes 2.5e-3 of the error."""


def key_tiles(
    lengths: Any, tables: torch.Tensor, block_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Blocks and spans for gather_tiles, and per sequence the number of the tile of position 0."""
    blocks, spans, origins = [], [], []
    for row, (cached, new) in enumerate(lengths, start=1):
        begin = 0 if window is None else max(cached + 1 - window, 0) // TILE
        end = -(-(cached + new) // TILE)
        per = TILE // block_size
        padded = torch.cat([tables[row], torch.zeros(per, dtype=torch.int32)])
        origins.append(len(spans) - begin)
        for tile in range(begin, end):
            part = padded[tile * per : (tile + 1) * per]
            blocks.append(torch.cat([part, part.new_zeros(per - len(part))]))
            spans.append((tile * TILE, cached, cached + new))
    return torch.cat(blocks), torch.tensor(spans, dtype=torch.int32), origins


def float8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, window: int | None, sinks: Any
) -> torch.Tensor:
    """As dense_attention, but with queries and weights rounded to float8 as persistent_float8 does."""
    cached = len(k) - len(q)
    scale = q.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    rounded = (q.float() * (1 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    rounded = rounded.view(len(q), spec.num_kv_heads, -1, spec.head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", rounded, k.double()) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = (cached + torch.arange(len(q)))[:, None] - torch.arange(len(k))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(k))), -torch.inf)
    m_i = torch.full(scores.shape[:-1], -1e30, dtype=torch.float64)
    l_i, acc = torch.zeros_like(m_i), torch.zeros(*m_i.shape, spec.head_dim, dtype=torch.float64)
    for part, of_values in zip(scores.split(TILE, -1), v.double().split(TILE), strict=True):
        m_new = torch.maximum(m_i, part.amax(-1))
        p = 256 * (part - m_new[..., None]).exp()
        alpha = (m_i - m_new).exp()
        l_i = l_i * alpha + p.sum(-1)
        p = p.float().to(torch.float8_e4m3fn).double()
        acc = acc * alpha[..., None] + torch.einsum("hgqk,khd->hgqd", p, of_values)
        m_i = m_new
    if sinks is not None:
        l_i = l_i + 256 * (sinks.double().view(spec.num_kv_heads, -1, 1) - m_i).exp()
    return (acc / l_i[..., None]).permute(2, 0, 1, 3).flatten(1, 2)


def check(
    lengths: Any,
    *,
    heads: Any = (2, 1),
    dim: int = 32,
    window: Any = None,
    softcap: Any = None,
    config: Any = SMALL,
    dtype: torch.dtype = torch.float32,
    kv_dtype: Any = None,
    value_scale: float = 1.0,
    block_size: Any = BLOCK_SIZE,
    has_sinks: bool = False,
    sharpness: float = 1.0,
    float8: bool = False,
    ordered: bool = False,
    consecutive: bool = False,
    moved: bool = False,
) -> None:
    """Run and compare. lengths: (cached, new) per sequence. Row 0 of out belongs to a decode and must not change.

    Slots that no query sees hold NaN, beyond the sequences and behind the window. sharpness: standard deviation of the
    scores; float8: whether to run persistent_float8, and to round queries and weights as it does; ordered: whether to
    pass an order, and consecutive: whether blocks are consecutive; moved: whether tiles begin earlier where that saves
    blocks.
    """
    torch.manual_seed(0)
    kv_dtype = kv_dtype or dtype
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 1).tolist()
    pool = [torch.full((sum(counts) + 1, block_size, heads[1], dim), torch.nan) for _ in range(2)]
    tables = torch.full((1 + len(lengths), max(counts)), order.pop(), dtype=torch.int32)
    starts = np.cumsum([0, 1, *(new for _, new in lengths)])
    q = torch.randn(int(starts[-1]), heads[0] + 2 * heads[1], dim).mul(sharpness).to(dtype).to(DEVICE)[:, : heads[0]]
    spec = AttentionSpec(
        num_layers=1,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        scale=dim**-0.5,
        dtype="float32",
        kv_dtype="float32",
        block_size=block_size,
        max_len=max(contexts),
        sliding_windows=(window,),
        softcap=softcap,
    )
    sinks = torch.linspace(-4.0, 8.0, heads[0]) if has_sinks else None
    expected = []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True), start=1):
        blocks = torch.arange(count) + sum(counts[: row - 1]) if consecutive else [order.pop() for _ in range(count)]
        tables[row, :count] = torch.as_tensor(blocks)
        first_query = lengths[row - 1][0]
        at = torch.arange(0 if window is None else max(first_query + 1 - window, 0), context)
        blocks = tables[row][at // block_size].long()
        k, v = (torch.randn(context, heads[1], dim).to(kv_dtype).float() for _ in range(2))
        pool[0][blocks, at % block_size], pool[1][blocks, at % block_size] = k[at], v[at]
        v = v.double() * value_scale
        reference = float8_attention if float8 else dense_attention
        expected.append(reference(q[starts[row] : starts[row + 1]].cpu(), k, v, spec, window, sinks))
    sequences = np.arange(1, 1 + len(lengths))
    group = heads[0] // heads[1]
    queries = np.diff(starts).astype(np.int32), np.array([1, *contexts], np.int32), sequences
    out = torch.full(q.shape, -7.0, dtype=dtype, device=DEVICE)
    keys, values = (part.to(kv_dtype).to(DEVICE) for part in pool)
    settings: Any = {
        "scale": spec.scale,
        "softcap": softcap,
        "window": window,
        "value_scale": value_scale,
        "sinks": None if sinks is None else sinks.to(DEVICE),
    }
    if float8:
        tiles = prefill_tiles(*queries, BLOCK_M // group)
        blocks, spans, origins = key_tiles(lengths, tables, block_size, window)
        tiles[:, 0] = np.array(origins)[tiles[:, 0] - 1]
        gathered = gather_tiles(keys, values, blocks.to(DEVICE), spans.to(DEVICE), window)
        float8_prefill(q, *gathered, torch.from_numpy(tiles).to(DEVICE), out, **settings)
    else:
        tiles = prefill_tiles(*queries, config.tokens(group), config.block_n if moved else None)
        if config.across_tiles:
            tiles = prefill_schedule(tiles, heads[1], num_sms(q.device), config.block_n, window=window)
        elif ordered:
            programs = min(len(tiles) * heads[1], num_sms(q.device))
            turns = prefill_order(tiles, heads[1], programs, min_turns=0)
            settings |= {"order": torch.from_numpy(turns).to(DEVICE), "consecutive": consecutive}
        sent = torch.from_numpy(tiles).to(DEVICE)
        paged_prefill(q, keys, values, tables.to(DEVICE), sent, out, config=config, **settings)
    assert (out[0] == -7).all(), "a decode's row was written"
    wanted = torch.cat(expected)
    # Where a query is near the middle of two float8 numbers, the kernel's division may round it otherwise.
    limit = FLOAT8_TOLERANCE if float8 else TOLERANCE[dtype]
    assert (out[1:].double().cpu() - wanted).norm() / wanted.norm() <= limit
