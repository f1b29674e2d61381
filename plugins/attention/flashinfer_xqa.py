"""FlashInfer's XQA kernel: decodes without a plan, from lengths and block tables on the device."""

from __future__ import annotations

import math

import torch

from engine.core.attention import AttentionSpec
from engine.core.quant import FLOAT8, KVScales

SCRATCH = 8 * 2**20
"""Bytes for partial results: at most one per multiprocessor, 8 KiB each with 16 heads of 256."""
SEMAPHORES = 2**16
"""Bytes: a 32-bit counter per sequence and KV head whose context is split, fewer than there are multiprocessors. The
counters are zero at first, and each kernel leaves them at zero."""


class XqaDecode:
    """Launches the kernel for all layers, one launch at a time."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from flashinfer.utils import device_support_pdl, get_device_sm_count
        from flashinfer.xqa import get_xqa_module, xqa

        self._spec = spec
        self._xqa = xqa
        self._module_of = get_xqa_module
        self._multiprocessors = get_device_sm_count(device)
        self._pdl = device_support_pdl(device)
        self._scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(SEMAPHORES, dtype=torch.uint8, device=device)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        scales: KVScales,
    ) -> None:
        """Compute attention of decoding sequences into `out`, over their whole contexts: see `xqa_refusal`.

        q, out: [decodes, heads, head_dim]; keys, values: [blocks, block_size, kv_heads, head_dim];
        tables: [decodes, max_blocks] int32, dense; lengths: [decodes, 1] uint32.
        """
        spec = self._spec
        q, out = q.contiguous().unsqueeze(1), out.unsqueeze(1)  # the kernel ignores strides
        scale = score_scale(spec, scales)
        if spec.kv_dtype != FLOAT8:
            self._xqa(
                q,
                keys,
                values,
                tables,
                lengths,
                out,
                self._scratch,
                self._semaphores,
                spec.num_kv_heads,
                spec.block_size,
                q_scale=scale,
                sliding_win_size=0,  # none
            )
            return
        # On Hopper, `xqa` calls another kernel for a float8 cache (mha_sm90.cu), which also rounds the queries and the
        # softmax to float8 (3 bits of mantissa). The kernel called here converts keys and values to q's type.
        module = self._module_of(
            q.dtype,
            keys.dtype,
            spec.block_size,
            spec.head_dim,
            spec.num_heads // spec.num_kv_heads,
            False,  # no sliding window
            out.dtype,
            1,
        )
        module.xqa(
            run_sm90_fp8_mha=False,
            sm_count=self._multiprocessors,
            num_kv_heads=spec.num_kv_heads,
            sliding_win_size=0,
            q_scale=scale,
            output=out,
            rcp_out_scale=1.0,
            q=q,
            sinks=None,
            k_cache=keys,
            v_cache=values,
            k_sf_cache=None,
            v_sf_cache=None,
            page_table=tables,
            max_seq_len=tables.shape[1] * spec.block_size,
            seq_lens=lengths,
            batch_size=len(q),
            kv_scale=scales.value,
            semaphores=self._semaphores,
            workspace_buffer=self._scratch,
            enable_pdl=self._pdl,
            q_seq_len=1,
            mask=None,
        )


def score_scale(spec: AttentionSpec, scales: KVScales) -> float:
    """Return the kernel's q_scale, which the kernel divides by sqrt(head_dim).

    The kernel has one scale for a float8 cache, here the value scale, and multiplies both scores and outputs by it.
    """
    return spec.scale * math.sqrt(spec.head_dim) * scales.key / scales.value
