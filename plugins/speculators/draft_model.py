"""A draft model: a smaller model of the same vocabulary, which proposes what it would generate greedily."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from engine.core.errors import CheckpointError, ConfigError
from engine.core.speculators import DeviceSpeculator, DrafterShape, DrafterSpec, SpeculatorSpec, TargetRows
from engine.core.weights import read_json
from engine.plugins.speculators.eagle3_config import is_eagle3
from engine.plugins.speculators.eagle_config import is_eagle

if TYPE_CHECKING:
    import torch

    from engine.core.layers import LayerFactory
    from engine.core.models import ForwardPass

TOKENIZER = "tokenizer.json"


class DraftModel(DeviceSpeculator[None]):
    """A draft model of any architecture of the installed model plugins. Computes the target's tokens, one row each."""

    api = "2"

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        if spec.config is None:
            return "it needs a draft model; name its directory or its name on the hub as speculator.model"
        if is_eagle3(spec.config):
            return "speculator.model has EAGLE-3 heads, which are not a model; use the speculator eagle3"
        if is_eagle(spec.config):
            return "speculator.model has EAGLE heads, which are not a model; use the speculator eagle"
        return None

    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        model_spec = spec.find_model(spec.config).spec(spec.config)
        check_vocabularies(spec, model_spec.vocab_size)
        return DrafterShape(model_spec=model_spec)

    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: None) -> None:
        cls = spec.find_model(spec.config)
        own = cls.spec(spec.config).vocab_size
        self._last_token = min(spec.vocab_size, own) - 1
        self._pads = own != spec.vocab_size
        """Whether one of the two vocabularies is padded, with tokens that the other lacks."""
        given = None if cls.options_class is None else cls.options_class()
        self._model = cls(spec.config, layers, given)
        self.no_graphs = self._model.no_graphs

    def observe(self, run: ForwardPass, target: TargetRows) -> torch.Tensor:
        return self._forward(run)

    def advance(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        return self._forward(run)

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self._model.greedy(hidden)[1]
        return tokens.clamp(max=self._last_token) if self._pads else tokens

    def _forward(self, run: ForwardPass) -> torch.Tensor:
        if self._pads:
            run = evolve(run, batch=evolve(run.batch, tokens=run.batch.tokens.clamp(max=self._last_token)))
        return self._model.forward(run)


def check_vocabularies(spec: DrafterSpec, vocab_size: int) -> None:
    """Raise ConfigError unless the tokens of the draft model are the target's.

    vocab_size: of the draft model. It may differ where both have the same tokenizer: some vocabularies are padded.
    """
    ours, theirs = spec.path / TOKENIZER, spec.target_path / TOKENIZER
    if not (ours.is_file() and theirs.is_file()):
        if vocab_size != spec.vocab_size:
            raise ConfigError(
                f"the draft model in {spec.path} has {vocab_size} tokens, and the model has {spec.vocab_size}; use a"
                f" draft model of the same vocabulary, with its {TOKENIZER}"
            )
        return
    if ours.read_bytes() == theirs.read_bytes():
        return
    own, wanted = _tokens(ours), _tokens(theirs)
    if own == wanted:
        return
    token = min(token for token in {*own, *wanted} if own.get(token) != wanted.get(token))
    raise ConfigError(
        f"the draft model in {spec.path} has another vocabulary than the model: token {token} is {own.get(token)!r}"
        f" there, and {wanted.get(token)!r} in {spec.target_path}; use a draft model of the same vocabulary"
    )


def _tokens(file: Path) -> Mapping[int, str]:
    """The tokens of a tokenizer.json, by id. Raises CheckpointError if the file is no such tokenizer."""
    try:
        content: Any = read_json(file)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {int(token): str(text) for text, token in vocabulary.items()}
        else:
            tokens = {token: str(text) for token, (text, _) in enumerate(vocabulary)}
        return {**tokens, **{int(added["id"]): str(added["content"]) for added in content.get("added_tokens", ())}}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {type(error).__name__}: {error}") from error
