"""Layers by fused Triton kernels. LayerFactory imports this module, and Triton, only if they are selected.

They compute what the plain layers compute, but keep intermediate results in float32, which the plain layers round to
the model's dtype. In float32 the two agree to the last digits, in 16-bit dtypes to a rounding.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from engine.core.attention.base import HeadRotation
from engine.core.autotune.op import AutotunedCall, Operands
from engine.core.distributed.partial_sum import PartialSum, ReceivedSum, SplitSum
from engine.core.distributed.scattered_rows import whole_rows
from engine.core.distributed.scattered_sum import OwnRows, scattered_chunks
from engine.core.layers.attention import Attention
from engine.core.layers.base import torch_dtype
from engine.core.layers.embedding import VocabParallelEmbedding
from engine.core.layers.fused_experts import FusedPlainExperts, fused_route
from engine.core.layers.head_norm import ProjectionNorm
from engine.core.layers.latent import LatentKeys
from engine.core.layers.layer_classes import LayerClasses
from engine.core.layers.lm_head import LMHead, VocabParallelHead
from engine.core.layers.norm import RMSNorm
from engine.core.layers.normed_parts import NormedParts
from engine.core.layers.rotary import Angles, RotaryEmbedding, RotarySpec
from engine.core.layers.skinny_linear import SkinnyGemms, SkinnyKernel
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.attention.latent_rope import rotate_and_write_latents
from engine.ops.attention.rope_and_cache import angles, rotate_and_write
from engine.ops.experts import norm_router
from engine.ops.gemm.skinny_launch import HEAD_MAX_ROWS
from engine.ops.norm.all_reduce_rms_norm import all_reduce_rms_norm
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.sampling.argmax import argmax_rows
from engine.ops.sampling.vocab_parallel import choose_max_logits, look_up, place_max_logits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.core.distributed.rank_group import RankGroup
    from engine.core.layers.embedding import Embedding
    from engine.core.layers.linear import Linear, TensorOrQuantized
    from engine.core.models.forward_pass import ForwardPass
    from engine.core.quant.base import FusedInputQuantization
    from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers


class FusedRMSNorm(RMSNorm):
    """Residual addition and norm in one kernel, which also reduces small partial sums if ranks share GPU memory."""

    def __init__(
        self, name: str, size: int, eps: float, dtype: str, group: RankGroup, *, unit_offset: bool = False
    ) -> None:
        super().__init__(name, size, eps, dtype, unit_offset=unit_offset)
        self._size = size
        self._buffers = group.reduce_buffers(size, torch_dtype(dtype))

    def __call__(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As RMSNorm; x + residual overwrites `residual`."""
        chunks = scattered_chunks(x)
        if chunks is not None:
            made = NormedParts(self, None, chunks, residual, chunks[0].group)
            return torch.cat(cast("list[torch.Tensor]", list(made))), made.residual()
        residual = whole_rows(residual)
        if isinstance(x, PartialSum):
            if isinstance(x, ReceivedSum):
                return self._of_received(x, residual)
            buffers = self._buffers_for(x)
            if buffers is not None:
                return all_reduce_rms_norm(x.addend, residual, self.weight, self.eps, buffers)
            x = x.reduce()
        return add_rms_norm(x, residual, self.weight, self.eps)

    def quantized_for(
        self, linear: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """As RMSNorm; x + residual overwrites `residual`. A norm whose kernel reduces does not quantize."""
        if scattered_chunks(x) is not None:
            return self(x, residual)
        residual = whole_rows(residual)
        if isinstance(x, PartialSum):
            if isinstance(x, ReceivedSum):
                return self._of_received_for(linear, x, residual)
            if self._buffers_for(x) is not None:
                return self(x, residual)
            x = x.reduce()
        fused = self._quantization_for(linear, x)
        if fused is None:
            return self(x, residual)
        return fused.norm_and_quantize(x, residual, self.weight, self.eps, linear.weights)

    def with_logits(
        self, router: Linear, x: torch.Tensor | PartialSum, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As RMSNorm; for few tokens in one kernel, unless x is to be summed over ranks. May overwrite `residual`."""
        if isinstance(x, PartialSum):
            if x.group.ranks > 1:
                return super().with_logits(router, x, residual)
            x = x.reduce()
        if type(router.kernel) is SkinnyKernel:
            matrix = router.weights["weight"]
            if norm_router.suits(x, residual, matrix):
                return norm_router.norm_and_logits(x, residual, self.weight, self.eps, matrix, router.bias)
        return super().with_logits(router, x, residual)

    def _of_received(self, x: ReceivedSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum of all ranks' addends, which the kernel adds."""
        first, *others = x.receive()
        made = add_rms_norm(first, residual, self.weight, self.eps, others)
        if others:
            x.release()
        return made

    def _of_received_for(
        self, linear: Linear, x: ReceivedSum, residual: torch.Tensor | None
    ) -> tuple[TensorOrQuantized, torch.Tensor]:
        """As _of_received, quantized for `linear` where its kernel can."""
        fused = self._quantization_for(linear, x.addend)
        if fused is None or (isinstance(x, OwnRows) and not fused.has_row_tensors):
            return self._of_received(x, residual)
        addends = x.receive()
        if len(addends) == 1:
            return fused.norm_and_quantize(addends[0], residual, self.weight, self.eps, linear.weights)
        made = fused.sum_norm_and_quantize(addends, residual, self.weight, self.eps, linear.weights)
        x.release()
        return made

    def _quantization_for(self, linear: Linear, x: torch.Tensor) -> FusedInputQuantization | None:
        """What quantizes the norm of x for `linear`, if anything does."""
        fused = linear.fused_input_quantization(x)
        return None if fused is None or (self.unit_offset and not fused.reads_float32_norm_weight) else fused

    def _buffers_for(self, x: PartialSum) -> ReduceBuffers | None:
        """Memory in which the norm's kernel reduces x. None: x has too many rows, or ranks share no memory."""
        buffers = self._buffers
        fits = buffers is not None and not isinstance(x, SplitSum) and x.addend.numel() <= buffers.max_rows * self._size
        return buffers if fits else None


class FusedRotary(RotaryEmbedding):
    """Rotary embedding that computes a pass's angles in one kernel."""

    def __init__(self, spec: RotarySpec, dtype: str, device: str) -> None:
        frequencies, self._factor = spec.frequencies()
        self._frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [tokens] int64 -> cosines and sines: [tokens, rotary_dim / 2] float32."""
        return angles(positions, self._frequencies, self._factor)


class FusedAttention(Attention):
    """Norm of heads, rotation and the write to the cache in one kernel; queries and keys change in place.

    Where the backend does all of that within its own kernel, this kernel is not launched.
    """

    def __call__(self, run: ForwardPass, qkv: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """As Attention."""
        norm = self.norm
        # A rank's projections are large next to its heads, and behind large projections separate kernels are faster.
        if self.ranks == 1 and not isinstance(norm, ProjectionNorm) and (angles is None or len(angles) == 2):
            cos, sin = angles or (None, None)
            rotation = HeadRotation(
                cos=cos,
                sin=sin,
                norm_weight=None if norm is None else norm.weight,
                norm_eps=0.0 if norm is None else norm.eps,
                interleaved=self.interleaved,
            )
            out = run.attention.rotate_and_forward(self.layer, qkv, rotation, run.plan)
            if out is not None:
                return out.flatten(1)
        return super().__call__(run, qkv, angles)

    def _project(
        self, run: ForwardPass, qkv: torch.Tensor, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool, norm = run.pool, self.norm
        if isinstance(norm, ProjectionNorm):  # whose means take a reduction over the ranks before this kernel
            qk = qkv.view(qkv.shape[0], -1, self.head_dim).narrow(1, 0, self.num_heads + self.num_kv_heads)
            qk.copy_(norm(qk))
            norm = None
        cos, sin = angles or (None, None)
        rotate_and_write(
            qkv,
            pool.keys[self.layer],
            pool.values[self.layer],
            run.batch.slots,
            cos,
            sin,
            self.num_heads,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            pool.scales[self.layer].key,
            pool.scales[self.layer].value,
            interleaved=self.interleaved,
        )
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return q, k, v


class FusedLatentKeys(LatentKeys):
    """Norm, rotation and the write to the cache in one kernel; keys change in place."""

    def __call__(
        self,
        run: ForwardPass,
        layer: int,
        q: torch.Tensor,
        rotated: torch.Tensor,
        projected: torch.Tensor,
        angles: Angles,
    ) -> torch.Tensor:
        norm, slots = self.norm, run.batch.slots
        rotate_and_write_latents(
            q, rotated, projected, norm.weight, norm.eps, run.pool.keys[layer], slots, angles[0], angles[1]
        )
        return projected[:, None]


class FusedLMHead(LMHead):
    """LM head with skinny GEMM kernels, and a greedy token without logits in memory."""

    def __init__(self, table: Embedding, gemms: SkinnyGemms, dtype: str) -> None:
        super().__init__(table)
        self.gemm = gemms.head_gemm(table.rows, table.shape[1], dtype)

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        launch = self.gemm.logits_launches[hidden.shape[0]] if hidden.shape[0] <= HEAD_MAX_ROWS else None
        return F.linear(hidden, self._weight) if launch is None else launch(hidden, self._weight)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        launch = self.gemm.launches[hidden.shape[0]] if hidden.shape[0] <= HEAD_MAX_ROWS else None
        return argmax_rows(self(hidden)) if launch is None else launch.peaks(hidden, self._weight)

    def autotuned_calls(self) -> Sequence[AutotunedCall]:
        return [AutotunedCall(op=self.gemm, operands=Operands(weights={"weight": self._weight}))]

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self._weight = self.table.weight


class FusedVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocab-parallel embedding with one kernel for the lookup."""

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens, self.weight, self.first_token)


class FusedVocabParallelHead(VocabParallelHead):
    """Vocab-parallel head whose greedy tokens take two kernels and the all-reduce between them."""

    def _place(self, max_logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return place_max_logits(max_logits, tokens, self._shards.first_token, self._group.rank, self._group.ranks)

    def _choose(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_max_logits(candidates)


def fused_classes(dtype: str, device: str) -> LayerClasses:
    """The layers by Triton kernels. Layers of one shape share a skinny GEMM."""
    gemms = SkinnyGemms(device)
    return LayerClasses(
        linear_kernel=partial(SkinnyKernel, gemms=gemms),
        gated_activation=lambda activation: partial(act_and_mul, activation=activation),
        experts_kernel=FusedPlainExperts,
        route=fused_route,
        norm=FusedRMSNorm,
        rotary=FusedRotary,
        attention=FusedAttention,
        latent_keys=FusedLatentKeys,
        vocab_parallel_embedding=FusedVocabParallelEmbedding,
        lm_head=partial(FusedLMHead, gemms=gemms, dtype=dtype),
        vocab_parallel_head=FusedVocabParallelHead,
        argmax=argmax_rows,
    )
