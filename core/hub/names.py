"""Finds the directories of the models that settings name."""

from __future__ import annotations

from pathlib import Path

import attrs

from engine.core.config.model_name import is_hub_name
from engine.core.config.tree import EngineConfig, ModelConfig, SpeculatorConfig
from engine.core.errors import ConfigError
from engine.core.startup import Listener


def locate(model: ModelConfig, listener: Listener | None = None, *, config_only: bool = False) -> ModelConfig:
    """The settings with directories in place of names on the hub; downloads what is not on disk.

    The revision becomes a commit, and the name on the hub the one under which the model is served. Settings without
    such names are returned unchanged. config_only: neither weights nor tokenizer are wanted.
    Raises DownloadError, or ConfigError for a revision of a directory.
    """
    tokenizer = model.tokenizer
    if tokenizer and is_hub_name(tokenizer) and not config_only:
        from engine.core.hub.files import TOKENIZER_ONLY
        from engine.core.hub.snapshot import fetch

        found = fetch(tokenizer, download_dir=model.download_dir, wanted=TOKENIZER_ONLY, listener=listener)
        tokenizer = str(found.directory)
    if is_hub_name(model.path):
        from engine.core.hub.files import CONFIG_ONLY, Wanted
        from engine.core.hub.snapshot import fetch

        wanted = Wanted(
            tokenizer=not model.tokenizer, weights=model.load_format != "dummy", code=model.trust_remote_code
        )
        found = fetch(
            model.path,
            revision=model.revision,
            download_dir=model.download_dir,
            wanted=CONFIG_ONLY if config_only else wanted,
            listener=listener,
        )
        return attrs.evolve(
            model,
            path=str(found.directory),
            revision=found.commit,
            served_name=model.served_name or found.model,
            tokenizer=tokenizer,
        )
    if model.revision and Path(model.path).name != model.revision:  # a directory found before has its commit as name
        raise ConfigError(
            f"--revision {model.revision} is for a model of the hub, and {model.path} is none; leave it out"
        )
    return model if tokenizer == model.tokenizer else attrs.evolve(model, tokenizer=tokenizer)


def locate_speculator(
    config: EngineConfig, listener: Listener | None = None, *, config_only: bool = False
) -> SpeculatorConfig:
    """The settings of the speculator with a directory in place of a name on the hub; arguments and errors are
    `locate`'s."""
    own = config.speculator.model
    if not is_hub_name(own):
        return config.speculator
    model = attrs.evolve(config.model, path=own, revision="", tokenizer="")
    return attrs.evolve(config.speculator, model=locate(model, listener, config_only=config_only).path)
