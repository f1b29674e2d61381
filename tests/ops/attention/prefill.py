"""Compares a prefill kernel on random keys and values with the definition of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from engine.core.attention.base import AttentionSpec
from engine.ops.attention.paged_prefill import PrefillConfig, paged_prefill, prefill_tiles
from engine.testing.attention_cases import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
BLOCK_SIZE = 16
SMALL = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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
) -> None:
    """Run and compare. lengths: (cached, new) per sequence. Row 0 of out belongs to a decode and must not change.

    Slots that no query sees hold NaN, beyond the sequences and behind the window.
    """
    torch.manual_seed(0)
    kv_dtype = kv_dtype or dtype
    contexts = [cached + new for cached, new in lengths]
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 1).tolist()
    pool = [torch.full((sum(counts) + 1, block_size, heads[1], dim), torch.nan) for _ in range(2)]
    tables = torch.full((1 + len(lengths), max(counts)), order.pop(), dtype=torch.int32)
    starts = np.cumsum([0, 1, *(new for _, new in lengths)])
    q = torch.randn(int(starts[-1]), heads[0] + 2 * heads[1], dim).to(dtype).to(DEVICE)[:, : heads[0]]
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
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        first_query = lengths[row - 1][0]
        at = torch.arange(0 if window is None else max(first_query + 1 - window, 0), context)
        blocks = tables[row][at // block_size].long()
        k, v = (torch.randn(context, heads[1], dim).to(kv_dtype).float() for _ in range(2))
        pool[0][blocks, at % block_size], pool[1][blocks, at % block_size] = k[at], v[at]
        v = v.double() * value_scale
        expected.append(dense_attention(q[starts[row] : starts[row + 1]].cpu(), k, v, spec, window, sinks))
    sequences = np.arange(1, 1 + len(lengths))
    tiles = prefill_tiles(
        np.diff(starts).astype(np.int32),
        np.array([1, *contexts], np.int32),
        sequences,
        config.tokens(heads[0] // heads[1]),
    )
    out = torch.full(q.shape, -7.0, dtype=dtype, device=DEVICE)
    paged_prefill(
        q,
        *(part.to(kv_dtype).to(DEVICE) for part in pool),
        tables.to(DEVICE),
        torch.from_numpy(tiles).to(DEVICE),
        out,
        scale=spec.scale,
        softcap=softcap,
        window=window,
        value_scale=value_scale,
        sinks=None if sinks is None else sinks.to(DEVICE),
        config=config,
    )
    assert (out[0] == -7).all(), "a decode's row was written"
    wanted = torch.cat(expected)
    assert (out[1:].double().cpu() - wanted).norm() / wanted.norm() <= TOLERANCE[dtype]
