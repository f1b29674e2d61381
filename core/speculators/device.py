"""Contract of speculators that run on the device, next to the model: draft models, EAGLE heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from attrs import field, frozen

from engine.core.speculators.base import SpeculatorSpec

if TYPE_CHECKING:
    import torch

    from engine.core.layers import LayerFactory
    from engine.core.models.base import Model, ModelSpec
    from engine.core.models.forward_pass import ForwardPass

OptionsT = TypeVar("OptionsT")


@frozen(kw_only=True)
class DrafterSpec:
    """What a speculator on the device is built for. Later versions may add fields with defaults."""

    vocab_size: int
    """Tokens are ids from 0 to vocab_size - 1."""
    max_len: int
    """Maximum tokens of a sequence, prompt and output."""
    max_drafts: int
    """Maximum tokens of a proposal."""
    target: ModelSpec
    """The model that verifies the proposals."""
    target_path: Path
    """Directory of the target's checkpoint."""
    path: Path
    """Directory of the checkpoint with the speculator's weights: speculator.model, or the target's where that is
    empty."""
    config: Mapping[str, Any] = field(repr=False)
    """config.json of that checkpoint."""
    find_model: Callable[[Mapping[str, Any]], type[Model]] = field(repr=False)
    """Returns the class of the installed model plugins that builds the model of a config.json. Raises PluginError."""
    target_embedding: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    """The target's embedding, for the constructor alone: [tokens] int64 -> [tokens, hidden_size of the target]. None
    where the target makes none by the LayerFactory, and in `shape`."""
    target_norm: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    """The target's norm before its LM head: hidden states to normed ones, [tokens, hidden_size of the target]. None
    where the target makes none by LayerFactory.final_norm, and in `shape`."""
    target_greedy: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    """The target's LM head: normed hidden states [rows, hidden_size of the target] -> the token of the largest logit,
    [rows] int64. None in `shape`."""


@frozen(kw_only=True)
class DrafterShape:
    """What core needs to know of a speculator on the device before it is built."""

    model_spec: ModelSpec
    """Its attention layers, whose keys and values core caches; with `num_layers` 0 there are none. `vocab_size` and
    `hidden_size` are its own."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target, from 0: `observe` receives the hidden states that enter them. The target's number of layers
    stands for the hidden states that leave the last layer, before the norm."""


@frozen(kw_only=True, eq=False)
class TargetRows:
    """What the target has computed for the rows of a batch. A row is one token of one sequence."""

    hidden: torch.Tensor | None = None
    """[tokens, layers * hidden_size of the target]: the hidden states entering DrafterShape.hidden_layers, those of the
    layers side by side; None: there are none."""
    next_tokens: torch.Tensor | None = None
    """[tokens] int64: the token after that of each row, for speculators with `looks_ahead`. After a rejected draft
    arbitrary, but within the vocabulary."""


class DeviceSpeculator(ABC, Generic[OptionsT]):
    """Proposes the next tokens of sequences, on the device, in each rank's process.

    OptionsT: the speculator's own settings, an object of `options_class`; None for a speculator without any.

    Its attention layers have keys and values of their own, in the blocks and slots of the target's layers with full
    attention. Core calls `observe` for all rows that the target computes: so the speculator's cache holds the keys and
    values of the same tokens as the target's, including a prefix that another sequence has computed. Core then makes a
    proposal, token by token, greedily: `choose` a token, `advance` by it, and so on. `observe` overwrites what
    `advance` writes to the cache, once the target has computed the actual tokens.

    No proposal changes what is generated: core verifies it. A speculator that raises stops the engine, like a model.
    """

    api: ClassVar[str]
    """Version of the contract that the class was written for (base.API)."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([speculator.options]); None: no settings."""
    looks_ahead: ClassVar[bool] = False
    """Whether `observe` computes with the token after each row, so that what it returns for a sequence's last row gives
    the first draft. Otherwise the first draft takes a call of `advance` with the newest token."""

    no_graphs: str | None = None
    """Why CUDA graphs cannot hold `observe`, `advance` and `choose`, a clause to follow the speculator's name; None:
    they can. An instance may set it in its constructor."""

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        """A sentence that says why this speculator cannot be used here and what would work; None if it can."""
        return None

    @classmethod
    @abstractmethod
    def shape(cls, spec: DrafterSpec, options: OptionsT) -> DrafterShape:
        """The shape of the speculator. Raises CheckpointError or ConfigError where the checkpoint does not fit the
        target."""

    @abstractmethod
    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: OptionsT) -> None:
        """Make the layers, under the names of the checkpoint's tensors. The loader fills them afterwards.

        layers: makes layers for one rank, of the target's dtype and device. options: an instance of `options_class`,
        None without one.
        """

    @abstractmethod
    def observe(self, run: ForwardPass, target: TargetRows) -> torch.Tensor:
        """Compute the rows that the target has just computed, and write their keys and values.

        run: tokens, positions and slots are the target's. Returns the hidden states of the rows: [tokens, size], of a
        size of the speculator's own.
        """

    @abstractmethod
    def advance(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        """Compute one more token of each sequence.

        run: a batch of one token per sequence: the newest token, or the draft chosen last. hidden: [sequences, size],
        returned for each sequence by the call before, `observe` or `advance`. Returns the next: [sequences, size].
        """

    @abstractmethod
    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each sequence: [sequences] int64, ids of the target's vocabulary.

        hidden: [sequences, size]. All ranks must return the same.
        """
