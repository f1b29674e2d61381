"""A batch over a paged KV cache in benchmarks of attention, and how far a result is from the definition."""

from __future__ import annotations

import numpy as np
import torch
from tuned_attention import Contexts

from engine.core.attention import ForwardBatch


def make_batch(
    contexts: np.ndarray, news: np.ndarray, num_decodes: int, block_size: int, device: torch.device | str
) -> tuple[ForwardBatch, int]:
    """A batch of sequences whose blocks are in random order, and the number of blocks.

    contexts, news: [sequences] int32, tokens of each sequence and how many of these are new. num_decodes: number of
    sequences at the beginning that decode.
    """
    counts = -(-contexts // block_size)
    order = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    tables = np.zeros((len(contexts), int(counts.max())), np.int32)
    for row, blocks in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        tables[row, : len(blocks)] = blocks
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    zeros = torch.zeros(int(starts[-1]), dtype=torch.int64, device=device)
    batch = ForwardBatch(
        tokens=zeros,
        positions=zeros,
        slots=zeros,
        query_starts=torch.tensor(starts, device=device),
        context_lens=torch.tensor(contexts, device=device),
        block_tables=torch.tensor(tables, device=device),
        logit_rows=torch.tensor(starts[1:] - 1, dtype=torch.int64, device=device),
        num_decodes=num_decodes,
        query_lens_host=news,
        context_lens_host=contexts,
        block_tables_host=tables,
    )
    return batch, len(order)


def attention_error(of: Contexts, out: torch.Tensor) -> float:
    """Relative error of the first layer for the last token of the first and the last sequence, next to float64.

    out: [tokens, heads, head_dim], what a backend computed for `of`.
    """
    found, exact = [], []
    for row in (0, -1):
        context = int(of.batch.context_lens_host[row])
        blocks = of.batch.block_tables[row, : -(-context // of.spec.block_size)].long()
        k, v = (part[0][blocks].flatten(0, 1)[:context].double() for part in (of.pool.keys, of.pool.values))
        token = int(of.batch.query_starts[1:][row]) - 1
        q = of.q[token].double().view(of.spec.num_kv_heads, -1, of.spec.head_dim)
        weights = torch.einsum("hgd,khd->hgk", q, k).mul(of.spec.scale).softmax(-1)
        exact.append(torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1))
        found.append(out[token].double())
    return float((torch.stack(found) - torch.stack(exact)).norm() / torch.stack(exact).norm())
