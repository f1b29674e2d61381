"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer over hidden states of the model and the embedded next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from engine.core.errors import CheckpointError
from engine.core.layers import Layer
from engine.core.quant import TensorSpec
from engine.core.speculators import DrafterShape, DrafterSpec, SpeculatorSpec
from engine.plugins.speculators.eagle3_config import is_eagle3, parse_eagle3
from engine.plugins.speculators.heads import DraftHeads

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.layers import HeadNorm, LayerFactory, RMSNorm
    from engine.core.models import ForwardPass


class Eagle3(DraftHeads):
    """Takes the hidden states that enter three of the model's layers.

    A linear layer joins the states, side by side, into one. Heads differ in what is normed: nothing before the linear
    layer, its whole input, or the states of each layer (EAGLE 3.1); and in whether the output that is passed on is
    normed.
    """

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        if spec.config is None:
            return "it needs EAGLE-3 heads; name their directory or their name on the hub as speculator.model"
        if not is_eagle3(spec.config):
            return "config.json of speculator.model is not of EAGLE-3 heads; use those, or another speculator"
        return None

    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        config = parse_eagle3(spec.config, spec.target.num_layers)
        if config.num_drafts > spec.vocab_size:
            raise CheckpointError(
                f"the EAGLE-3 heads in {spec.path} have {config.num_drafts} draft tokens, and the model has"
                f" {spec.vocab_size} tokens; use heads that were trained for this model"
            )
        return DrafterShape(model_spec=config.layer.model_spec(config.num_drafts), hidden_layers=config.hidden_layers)

    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: None) -> None:
        config = parse_eagle3(spec.config, spec.target.num_layers)
        layer = config.layer
        size, eps = layer.hidden_size, layer.norm_eps
        name = "midlayer" if layers.stores("midlayer.self_attn.q_proj") else "layers.0"
        attention = f"{name}.self_attn"
        self._norm_before_residual, self._norm_output = config.norm_before_residual, config.norm_output
        states, target_size = len(config.hidden_layers), spec.target.hidden_size
        self._input_norms: list[RMSNorm] = []
        if config.norm_before_fc:
            self._input_norms = [layers.norm("input_norm", states * target_size, eps)]
        elif config.fc_norm:
            self._input_norms = [layers.norm(f"fc_norm.{place}", target_size, eps) for place in range(states)]
        self._fc = layers.linear([("fc", size)], states * target_size)
        self._embedding = _embedding(spec, layers, size)
        self._embedding_norm = layers.norm(f"{name}.input_layernorm", size, eps)
        self._hidden_norm = layers.norm(f"{name}.hidden_norm", size, eps)
        self._qkv = layers.qkv(
            (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            2 * size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            bias=layer.attention_bias,
        )
        heads, kv_heads = layers.shard(layer.num_heads, "query heads"), layers.shard_kv_heads(layer.num_kv_heads)
        head_norm: HeadNorm | None = None
        if layers.stores(f"{attention}.q_norm"):  # as a layer of Qwen3 has
            head_norm = layers.head_norm(
                [(f"{attention}.q_norm", heads), (f"{attention}.k_norm", kv_heads)], layer.head_dim, eps
            )
        self._attention = layers.attention(0, heads, kv_heads, layer.head_dim, head_norm, attention)
        self._output = layers.partial_linear(
            f"{attention}.o_proj", size, layer.num_heads * layer.head_dim, bias=layer.attention_bias
        )
        self._mlp = layers.gated_mlp(
            f"{name}.mlp", size, layer.intermediate_size, norm=f"{name}.post_attention_layernorm", eps=eps
        )
        self._rotary = layers.rotary(layer.rope)
        self._norm = layers.norm("norm", size, eps)
        self._head = layers.lm_head("lm_head", config.num_drafts, size)
        self._targets = TargetTokens(config.num_drafts, spec.vocab_size, spec.path.name)
        layers.layers.append(self._targets)
        layers.ignore("t2d")

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        norms = self._input_norms
        if not norms:
            return self._fc(hidden)
        parts = hidden.chunk(len(norms), -1)
        normed = [norm(part.contiguous())[0] for norm, part in zip(norms, parts, strict=True)]
        return self._fc(normed[0] if len(normed) == 1 else torch.cat(normed, -1))

    def forward(self, run: ForwardPass, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        normed, residual = self._hidden_norm(features)
        if self._norm_before_residual:
            residual = normed
        embedded, _ = self._embedding_norm(self._embedding(tokens))
        angles = self._rotary.angles(run.batch.positions)
        attended = self._attention(run, self._qkv(torch.cat((embedded, normed), -1)), angles)
        made, residual = self._mlp(self._output(attended), residual)
        # A partial sum is reduced by the norm, which also returns the sum with the residual.
        after, before = self._norm(made, residual)
        return after if self._norm_output else before

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = hidden if self._norm_output else self._norm(hidden)[0]
        return self._targets(self._head.greedy(normed)[1])


class TargetTokens(Layer):
    """The target's token of each draft token: draft token i is token i + d2t[i]; without d2t both are the same."""

    def __init__(self, num_drafts: int, vocab_size: int, where: str) -> None:
        """where: the checkpoint, in errors."""
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        self._where = where
        self._tokens: torch.Tensor | None = None

    def __call__(self, drafts: torch.Tensor) -> torch.Tensor:
        """[rows] int64 -> [rows] int64."""
        return drafts if self._tokens is None else self._tokens[drafts]

    def tensors(self) -> Mapping[str, TensorSpec]:
        optional = self._num_drafts == self._vocab_size
        return {"d2t": TensorSpec(shape=(self._num_drafts,), dtypes=("int64", "int32"), optional=optional)}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        if "d2t" not in loaded:
            return
        offsets = loaded["d2t"].long()
        tokens = torch.arange(self._num_drafts, device=offsets.device) + offsets
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise CheckpointError(
                f"d2t of the EAGLE-3 heads in {self._where} leads to tokens beyond the model's {self._vocab_size}; use"
                " heads that were trained for this model"
            )
        self._tokens = tokens

    @property
    def nbytes(self) -> int:
        return 0 if self._tokens is None else self._tokens.nbytes


def _embedding(spec: DrafterSpec, layers: LayerFactory, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The heads' own embedding, or else the model's."""
    if layers.stores("embed_tokens"):
        return layers.embedding("embed_tokens", spec.vocab_size, size)
    if spec.target_embedding is None or spec.target.hidden_size != size:
        raise CheckpointError(
            f"the EAGLE-3 heads in {spec.path} have no embed_tokens.weight, and the model's embedding cannot stand for"
            f" it: the heads have {size} numbers per token, the model {spec.target.hidden_size}"
        )
    return spec.target_embedding
