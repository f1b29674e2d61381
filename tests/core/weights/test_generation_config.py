"""Every key of generation_config.json that transformers has: honoured, without effect, or named in a warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.core import Engine, SamplingParams
from engine.core.errors import InvalidRequestError
from engine.core.weights.generation_config import (
    HONOURED,
    NEUTRAL,
    WITHOUT_EFFECT,
    default_params,
    not_honoured,
)
from engine.testing.checkpoints import make_checkpoint

MAX_LEN = 512


def keys_of(config: Any) -> set[str]:
    return {key for key in vars(config) if not key.startswith("_")}


def test_every_key_of_transformers_is_known() -> None:
    tables = (HONOURED, NEUTRAL.keys(), WITHOUT_EFFECT)
    unknown = keys_of(transformers.GenerationConfig()) - set().union(*tables)
    assert not unknown, f"say in core/weights/generation_config.py what is done with {sorted(unknown)}"
    assert sum(len(table) for table in tables) == len(set().union(*tables)), "a key is in two tables"


@pytest.mark.parametrize(
    ("stored", "honoured"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "min_p": 0.1}, SamplingParams(temperature=0.5, top_p=0.9, min_p=0.1)),
        ({"do_sample": False, "temperature": 0.5}, SamplingParams(temperature=0.0)),
        ({"top_k": -1}, SamplingParams(top_k=0)),
        ({"top_k": 7, "repetition_penalty": 1.5}, SamplingParams(top_k=7, repetition_penalty=1.5)),
        ({"stop_strings": "return"}, SamplingParams(stop=("return",))),
        ({"stop_strings": ["a", "bc"]}, SamplingParams(stop=("a", "bc"))),
        ({"max_new_tokens": 9}, SamplingParams(max_tokens=9)),
        (dict.fromkeys(HONOURED), SamplingParams()),
    ],
)
def test_settings_become_defaults_of_requests(stored: dict[str, Any], honoured: SamplingParams) -> None:
    assert default_params(stored) == honoured
    assert not_honoured(stored, MAX_LEN) == []


@pytest.mark.parametrize("stored", [{"stop_strings": 3}, {"temperature": "hot"}, {"top_k": -2}])
def test_invalid_setting_is_an_error(stored: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        default_params(stored)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bad_words_ids", [[5]]),
        ("begin_suppress_tokens", [5]),
        ("epsilon_cutoff", 0.1),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("forced_eos_token_id", 5),
        ("guidance_scale", 1.5),
        ("max_length", 20),
        ("max_time", 3.0),
        ("min_length", 5),
        ("min_new_tokens", 5),
        ("no_repeat_ngram_size", 2),
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("sequence_bias", [[[5], 2.0]]),
        ("suppress_tokens", [5, 6]),
        ("token_healing", True),
        ("typical_p", 0.9),
        ("watermarking_config", {"bias": 2.0}),
        ("anything_else", 3),
    ],
)
def test_setting_that_is_not_used_is_named(key: str, value: Any) -> None:
    assert not_honoured({key: value, "top_p": 0.9}, MAX_LEN) == [f"{key} {json.dumps(value)}"]


def test_long_value_is_shortened() -> None:
    (named,) = not_honoured({"suppress_tokens": list(range(1000))}, MAX_LEN)
    assert named.startswith("suppress_tokens [0, 1, ")
    assert len(named) < 80


def test_defaults_of_transformers_are_not_named() -> None:
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert not_honoured({key: value for key, value in defaults.items() if key not in HONOURED}, 20) == []
    assert not_honoured({"max_length": MAX_LEN, "num_beams": 1, "_from_model_config": True}, MAX_LEN) == []


def test_engine_warns_once_per_file_of_what_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "logit_scale": 2.0}))
    (path / "generation_config.json").write_text(json.dumps({"num_beams": 4, "typical_p": 0.9, "top_k": -1}))
    settings: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "4MiB"}
    with caplog.at_level(logging.WARNING), Engine(model=str(path), **settings) as engine:
        assert engine.default_params.top_k == 0
    said = [record.getMessage() for record in caplog.records if record.name == "engine.core.engine_start"]
    assert said == [
        "config.json has keys that Llama does not know, and that are not used: logit_scale",
        "generation_config.json has settings that are not used: num_beams 4, typical_p 0.9",
    ]


def test_engine_warns_of_nothing_without_such_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    settings: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "4MiB"}
    with caplog.at_level(logging.WARNING), Engine(model=str(path), **settings):
        pass
    assert [record.name for record in caplog.records if record.name == "engine.core.engine_start"] == []
