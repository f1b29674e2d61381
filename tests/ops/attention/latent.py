"""Sequences in a latent cache, and their attention by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from attrs import define

from engine.core.attention.base import AttentionSpec
from engine.ops.attention.latent_decode import LatentDecodeConfig, latent_decode
from engine.ops.attention.latent_merge import LatentWorkspace
from engine.ops.attention.latent_prefill import heads_per_tile, latent_prefill
from engine.ops.attention.paged_prefill import prefill_tiles
from engine.ops.attention.paged_prefill_config import PrefillConfig
from engine.testing.attention_cases import dense_attention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
DECODE = LatentDecodeConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, programs_per_sm=1)
PREFILL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@define(slots=False)
class Case:
    """Sequences of (cached, new) tokens, NaN where no query sees a slot, and the expected attention of new tokens."""

    lengths: Sequence[tuple[int, int]]
    heads: int = 2
    latent: int = 32
    rotated: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(0)
        size = self.latent + self.rotated
        self.contexts = [cached + new for cached, new in self.lengths]
        self.news = [new for _, new in self.lengths]
        counts = [-(-context // self.block_size) for context in self.contexts]
        order = torch.randperm(sum(counts) + 1).tolist()
        cache = torch.full((sum(counts) + 1, self.block_size, 1, size), torch.nan)
        self.tables = torch.full((len(counts), max(counts)), order.pop(), dtype=torch.int32)
        # A view with gaps between tokens.
        self.q = torch.randn(sum(self.news), self.heads + 1, size).to(self.dtype).to(DEVICE)[:, : self.heads]
        spec = AttentionSpec(
            num_layers=1,
            num_heads=self.heads,
            num_kv_heads=1,
            head_dim=size,
            scale=size**-0.5,
            dtype="float32",
            kv_dtype="float32",
            block_size=self.block_size,
            max_len=max(self.contexts),
            sliding_windows=(None,),
            value_head_dim=self.latent,
            latent=True,
        )
        self.scale = spec.scale
        expected, start = [], 0
        for row, (context, count, new) in enumerate(zip(self.contexts, counts, self.news, strict=True)):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
            at = torch.arange(context)
            k = torch.randn(context, 1, size).to(self.dtype).float()
            cache[self.tables[row][at // self.block_size].long(), at % self.block_size] = k
            q = self.q[start : start + new].cpu()
            expected.append(dense_attention(q, k, k[..., : self.latent], spec, None))
            start += new
        self.expected = torch.cat(expected)
        self.cache = cache.to(self.dtype).to(DEVICE)

    def output(self, extra_rows: int = 0) -> torch.Tensor:
        """An output of numbers that no attention has."""
        rows = sum(self.news) + extra_rows
        return torch.full((rows, self.heads, self.latent), -7.0, dtype=self.dtype, device=DEVICE)

    def workspace(self, programs: int) -> LatentWorkspace:
        made = LatentWorkspace.make(programs, self.heads, self.latent, DEVICE)
        made.acc.fill_(torch.nan)
        made.stats.fill_(torch.nan)
        return made

    def decode(
        self, workspace: LatentWorkspace, config: LatentDecodeConfig = DECODE, extra_rows: int = 0
    ) -> torch.Tensor:
        """Decode sequences of one new token each."""
        out = self.output(extra_rows)
        latent_decode(
            self.q,
            self.cache,
            self.tables.to(DEVICE),
            torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE),
            out,
            num_sequences=len(self.contexts),
            scale=self.scale,
            workspace=workspace,
            config=config,
        )
        return out

    def prefill(self, config: PrefillConfig = PREFILL, first: int = 0) -> torch.Tensor:
        """Compute the new tokens of the sequences from `first` on."""
        tiles = prefill_tiles(
            np.array(self.news, np.int32),
            np.array(self.contexts, np.int32),
            np.arange(first, len(self.news)),
            config.tokens(heads_per_tile(self.heads, config)),
        )
        out = self.output()
        tables, listed = self.tables.to(DEVICE), torch.from_numpy(tiles).to(DEVICE)
        latent_prefill(self.q, self.cache, tables, listed, out, scale=self.scale, config=config)
        return out

    def check(self, out: torch.Tensor, first_row: int = 0) -> None:
        """Compare rows of an output from `first_row` on."""
        expected = self.expected[first_row:]
        error = (out[first_row : len(self.expected)].double().cpu() - expected).norm() / expected.norm()
        assert error <= TOLERANCE[self.dtype]


def decodes(*contexts: int) -> list[tuple[int, int]]:
    """Lengths of decoding sequences."""
    return [(context - 1, 1) for context in contexts]
