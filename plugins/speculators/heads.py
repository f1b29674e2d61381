"""What drafting heads share: one decoder layer over the model's hidden states and the embedded next token."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from engine.core.distributed import PartialSum
from engine.core.errors import ConfigError
from engine.core.speculators import DeviceSpeculator, TargetRows

if TYPE_CHECKING:
    import torch

    from engine.core.layers import LayerFactory
    from engine.core.models import ForwardPass
    from engine.plugins.speculators.heads_config import HeadLayerConfig

T = TypeVar("T")


class DraftHeads(DeviceSpeculator[None]):
    """Base of drafting heads: row i takes the model's hidden states at token i and the embedding of token i + 1.

    While a proposal is made, the output of the heads stands for the hidden states of the model.
    """

    api = "2"
    looks_ahead = True

    def observe(self, run: ForwardPass, target: TargetRows) -> torch.Tensor:
        assert target.hidden is not None, "the shape asks for hidden states"
        assert target.next_tokens is not None, "the speculator looks ahead"
        return self.forward(run, target.next_tokens, self.features(target.hidden))

    def advance(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        return self.forward(run, run.batch.tokens, hidden)

    @abstractmethod
    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's hidden states, [rows, TargetRows.hidden], as `forward` takes them: [rows, hidden_size]."""

    @abstractmethod
    def forward(self, run: ForwardPass, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The output of the heads, which is the `features` of the next token: [rows, hidden_size].

        tokens: [rows] int64, the token after each row. features: [rows, hidden_size].
        """


class HeadLayer:
    """A decoder layer of attention and a gated MLP, without a norm of its output."""

    def __init__(self, name: str, config: HeadLayerConfig, layers: LayerFactory, *, norm: str, qkv_bias: bool) -> None:
        """name: of the layer in the checkpoint. norm: name of its input norm; empty: it has none. qkv_bias: whether
        queries, keys and values have biases by config.json."""
        attention = f"{name}.self_attn"
        self._attention = layers.attention_block(
            0,
            attention,
            config.hidden_size,
            norm=norm,
            eps=config.norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=has_bias(f"{attention}.q_proj", layers, by_config=qkv_bias),
            output_bias=has_bias(f"{attention}.o_proj", layers, by_config=False),
        )
        self._mlp = layers.gated_mlp(
            f"{name}.mlp",
            config.hidden_size,
            config.intermediate_size,
            norm=f"{name}.post_attention_layernorm",
            eps=config.norm_eps,
        )
        self._rotary = layers.rotary(config.rope)

    def __call__(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, hidden_size]. hidden: may be overwritten."""
        angles = self._rotary.angles(run.batch.positions)
        made, residual = self._mlp(*self._attention(run, hidden, None, angles))
        return (made.reduce() if isinstance(made, PartialSum) else made) + residual


def has_bias(module: str, layers: LayerFactory, *, by_config: bool) -> bool:
    """Whether a linear layer has a bias: if config.json says so, or the checkpoint has one."""
    return by_config or bool(layers.stores_tensor(f"{module}.bias"))


def from_target(part: T | None, heads: str, what: str) -> T:
    """A part of the target that the heads use. Raises ConfigError if core does not know of it.

    heads: how the error names the heads; what: how it names the part.
    """
    if part is None:
        raise ConfigError(f"{heads} use the model's {what}, which its plugin does not make by the LayerFactory")
    return part
