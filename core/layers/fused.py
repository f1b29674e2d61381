"""The layers by fused Triton kernels; LayerFactory imports this only when such kernels are wanted.

They compute what the plain layers do, in float32 from one rounding to the next where those round each intermediate
result to the model's type: in float32 the two agree to the last digits, in shorter types to a rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.core.autotune.op import AutotunedCall, Operands
from engine.core.layers.attention import Attention
from engine.core.layers.base import torch_dtype
from engine.core.layers.embedding import SharedEmbedding
from engine.core.layers.lm_head import Head, LMHead, SharedHead
from engine.core.layers.norm import HeadNorm, RMSNorm
from engine.core.layers.plain import PlainLayers
from engine.core.layers.rotary import Angles, RotaryEmbedding, RotarySpec
from engine.core.layers.skinny_linear import FewRowsTables, SkinnyKernel
from engine.ops.activation.silu_and_mul import silu_and_mul
from engine.ops.attention.rope_and_cache import angles, rotate_and_write
from engine.ops.gemm.skinny_launch import SKINNY_MAX_ROWS, Epilogue, GemmShape
from engine.ops.norm.all_reduce_rms_norm import sum_rms_norm
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.sampling.argmax import argmax_rows
from engine.ops.sampling.vocab_parallel import choose_peaks, look_up, place_peaks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.embedding import Embedding
    from engine.core.layers.linear import Linear, Rows
    from engine.core.models.forward_pass import ForwardPass
    from engine.core.quant.base import LinearKernel, LinearSpec
    from engine.ops.norm.all_reduce_rms_norm import RowSums

HEAD_EPILOGUES: tuple[Epilogue, Epilogue] = ("plain", "argmax")


class FusedRMSNorm(RMSNorm):
    """Residual addition and norm in one kernel."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See RMSNorm; `residual` is overwritten with the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def into(
        self, following: Linear, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """See RMSNorm; `residual` is overwritten with the sum."""
        fused = following.fused_input_quantization(x)
        if fused is None:
            return self(x, residual)
        return fused.norm_and_quantize(x, residual, self.weight, self.eps, following.weights)


class FusedSummingNorm(FusedRMSNorm):
    """Few rows are summed over the ranks, added and normalised in one kernel, where these reach each other's memory."""

    def __init__(self, name: str, size: int, eps: float, dtype: str, group: RankGroup) -> None:
        super().__init__(name, size, eps, dtype)
        self._size = size
        self._group = group
        self._sums = group.row_sums(size, torch_dtype(dtype))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See SummingNorm; `residual` is overwritten with the sum."""
        sums = self._sums_for(x)
        if sums is not None:
            return sum_rms_norm(x, residual, self.weight, self.eps, sums)
        return super().__call__(self._group.all_reduce(x), residual)

    def into(
        self, following: Linear, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Rows, torch.Tensor]:
        """See FusedRMSNorm. Rows that are summed in the norm's own kernel come as tensors."""
        if self._sums_for(x) is not None or following.fused_input_quantization(x) is None:
            return self(x, residual)
        return super().into(following, self._group.all_reduce(x), residual)

    def _sums_for(self, x: torch.Tensor) -> RowSums | None:
        """Memory for the sums of these rows; None: they are too many, or there is none."""
        sums = self._sums
        return sums if sums is not None and x.numel() <= sums.most_rows * self._size else None


class FusedRotary(RotaryEmbedding):
    """Computes a pass's angles in one kernel."""

    def __init__(self, spec: RotarySpec, device: str) -> None:
        frequencies, self._factor = spec.frequencies()
        self._frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [tokens] int64 -> cosines and sines, [tokens, rotary_dim / 2] float32."""
        return angles(positions, self._frequencies, self._factor)


class FusedAttention(Attention):
    """Norm of heads, rotation and the write to the cache in one kernel; queries and keys change where they lie."""

    def _project(
        self, run: ForwardPass, qkv: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool, norm = run.pool, self.norm
        rotate_and_write(
            qkv,
            pool.keys[self.layer],
            pool.values[self.layer],
            run.batch.slots,
            *angles,
            self.num_heads,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            pool.scales[self.layer],
        )
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return q, k, v


class FusedLMHead(LMHead):
    """Few rows by the kernels chosen; the likeliest token without logits in memory."""

    def __init__(self, table: Embedding, tables: FewRowsTables, dtype: str) -> None:
        super().__init__(table)
        outputs, inputs = table.rows, table.shape[1]
        self.few_rows, self.few_rows_greedy = (
            tables.table(GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype=dtype))
            for epilogue in HEAD_EPILOGUES
        )

    @property
    def weight(self) -> torch.Tensor:
        """[this rank's tokens, hidden_size]."""
        return self._weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See LMHead."""
        launch = self.few_rows.launches[hidden.shape[0]] if hidden.shape[0] <= SKINNY_MAX_ROWS else None
        return F.linear(hidden, self._weight) if launch is None else launch(hidden, self._weight)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See LMHead. Up to 16 rows are compared before logits are rounded to the model's type, so that logits equal
        there may still differ here; then this takes the likelier, not the first."""
        launch = self.few_rows_greedy.launches[hidden.shape[0]] if hidden.shape[0] <= SKINNY_MAX_ROWS else None
        return argmax_rows(self(hidden)) if launch is None else launch.peaks(hidden, self._weight)

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        """With logits and without."""
        operands = Operands(weights={"weight": self._weight})
        return [AutotunedCall(op=one, operands=operands) for one in (self.few_rows, self.few_rows_greedy)]

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Take over the table as it is."""
        self._weight = self._table.weight


class FusedSharedEmbedding(SharedEmbedding):
    """Looks up in one kernel."""

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """See SharedEmbedding."""
        return look_up(tokens, self.weight, self.first)


class FusedSharedHead(SharedHead):
    """Exchanges the likeliest tokens by two kernels, and the sum between them."""

    def _place(self, peaks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return place_peaks(peaks, tokens, self._table.first, self._group.rank, self._group.ranks)

    def _choose(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_peaks(candidates)


class FusedLayers(PlainLayers):
    """Layers by Triton kernels."""

    def __init__(self, dtype: str, device: str) -> None:
        super().__init__(dtype, device)
        self.tables = FewRowsTables(device)

    def kernel(self, spec: LinearSpec) -> LinearKernel:
        """See SkinnyKernel."""
        return SkinnyKernel(spec, self.tables)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """See kernels.activation.silu_and_mul."""
        return silu_and_mul(x)

    def shared_embedding(self, name: str, vocab_size: int, hidden_size: int, group: RankGroup) -> SharedEmbedding:
        """See FusedSharedEmbedding."""
        return FusedSharedEmbedding(name, vocab_size, hidden_size, self.dtype, group)

    def lm_head(self, table: Embedding) -> LMHead:
        """See FusedLMHead."""
        return FusedLMHead(table, self.tables, self.dtype)

    def shared_head(self, local: LMHead, table: SharedEmbedding) -> Head:
        """See FusedSharedHead."""
        return FusedSharedHead(local, table)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """See FusedRMSNorm."""
        return FusedRMSNorm(name, size, eps, self.dtype)

    def summing_norm(self, name: str, size: int, eps: float, group: RankGroup) -> RMSNorm:
        """See FusedSummingNorm."""
        return FusedSummingNorm(name, size, eps, self.dtype, group)

    def rotary(self, spec: RotarySpec) -> RotaryEmbedding:
        """See FusedRotary."""
        return FusedRotary(spec, self.device)

    def attention(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, norm: HeadNorm | None
    ) -> Attention:
        """See FusedAttention."""
        return FusedAttention(layer, num_heads, num_kv_heads, head_dim, norm)
