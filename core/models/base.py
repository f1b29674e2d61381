"""Contract of plugins/models: an architecture, built from a Hugging Face config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from engine.core.layers import LayerFactory
    from engine.core.models.forward_pass import ForwardPass

API = "1"


@frozen(kw_only=True)
class ModelSpec:
    """What core must know of a model before it is built."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_len: int
    """Longest context the model was made for, tokens."""
    sliding_windows: tuple[int | None, ...]
    """For each layer; None: full attention."""
    scale: float
    """Factor on q.k."""
    softcap: float | None = None


class Model(ABC):
    """A network whose linear layers, norms and attention come from the LayerFactory it is given.

    It holds no batch and no state between passes. Its parameters are named as in the checkpoint.
    """

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None

    @classmethod
    @abstractmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Why this class cannot build the model of this config.json, and what would work; None if it can."""

    @classmethod
    @abstractmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The shape of the model of this config.json.

        Raises CheckpointError for a config that lacks something, as `checkpoint.read_key` does.
        """

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        """Build the layers; `layers` notes each one, and the loader fills them afterwards."""

    @abstractmethod
    def forward(self, run: ForwardPass) -> torch.Tensor:
        """Hidden states of the batch's tokens before the LM head: [tokens, hidden_size].

        May be recorded in CUDA graphs, cut at each call of `run.attention.forward`: of the batch it may use tokens,
        positions and slots (and their number), and hand the rest to attention.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row ([rows] float32) and its token ([rows] int64), the first of equals.

        hidden: [rows, hidden_size]. With a NaN among a row's logits the peak is NaN and the token some token. Override
        it where the layers find the peak without keeping logits (LMHead.greedy), which may compare them before they
        are rounded to the model's type and so break ties in another way.
        """
        peaks, tokens = self.logits(hidden).max(dim=-1)
        return peaks.float(), tokens
