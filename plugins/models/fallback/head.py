"""The output layer with what the library's model computes around it, such as soft caps and multipliers of logits."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.plugins.models.fallback.errors import RefusedError
from engine.plugins.models.fallback.library import decoder_name, decoder_of
from engine.plugins.models.fallback.recognize import SCALES

if TYPE_CHECKING:
    from engine.core.layers import OutputLayer
    from engine.plugins.models.fallback.modules import HeadModule
    from engine.plugins.models.fallback.trace import Blueprint


class _Result:
    """Stands in for the library's result of a base model: hidden states, and None for every other attribute."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in for the base model, and returns the hidden states that it was given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None
        self._inside = frozenset(decoder._modules)

    def __getattr__(self, name: str) -> Any:
        """Some models call a module inside of the base model."""
        return self if name in self.__dict__.get("_inside", ()) else super().__getattr__(name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The library's result of a base model."""
        return _Result(self.hidden)


class _Trial(nn.Module):
    """Stands in for the output layer: notes its input and returns logits that it was given."""

    bias = None

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The given logits."""
        self.seen = hidden
        return self._logits


class Head:
    """Hidden states to logits, by the output layer alone where the library's model adds nothing."""

    def __init__(self, model: Any, name: str, module: HeadModule, layer: OutputLayer, blueprint: Blueprint) -> None:
        """name: of the output layer, a child of the model. Raises RefusedError if no logits can be computed."""
        self._name = name
        self.layer = layer
        self._given = _Given(decoder_of(model))
        self._shell = copy.copy(model)
        self._shell._modules = {**model._modules, decoder_name(model): self._given}
        self.is_plain = module.bias is None and self._adds_nothing(blueprint)
        """Whether logits are the output layer's, so that its greedy tokens are the model's."""
        self._shell._modules[name] = module

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""
        return self.layer(hidden) if self.is_plain else self._run(hidden)

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The library's own way from hidden states to logits."""
        self._given.hidden = hidden[None]
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._shell(input_ids=tokens, position_ids=tokens, use_cache=False).logits[0]
        self._given.hidden = None
        return logits

    def _adds_nothing(self, blueprint: Blueprint) -> bool:
        """Whether the output layer gets the hidden states as they are, and its logits are returned as they are."""
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor(SCALES)[:, None]
        hidden = scales * torch.randn(len(SCALES), blueprint.hidden_size, generator=generator)
        logits = scales * torch.randn(1, len(SCALES), blueprint.vocab_size, generator=generator)
        trial = _Trial(logits)
        self._shell._modules[self._name] = trial
        try:
            found = self._run(hidden)
        except Exception as error:  # of the library's code
            raise RefusedError(
                f"computes no logits from hidden states alone: {type(error).__name__}: {error}"
            ) from error
        return trial.seen is not None and torch.equal(trial.seen[0], hidden) and torch.equal(found, logits[0])
