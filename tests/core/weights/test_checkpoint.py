from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import CheckpointError
from engine.core.weights.checkpoint import Checkpoint, read_key


@pytest.fixture
def directory(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "eos_token_id": 3}))
    return tmp_path


def write_generation(directory: Any, **content: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(content))


def test_open_reads_the_json_files(directory: Any) -> None:
    write_generation(directory, top_k=5)
    checkpoint = Checkpoint.open(str(directory))
    assert checkpoint.path == directory
    assert checkpoint.config["model_type"] == "any"
    assert checkpoint.generation_config == {"top_k": 5}


def test_open_reads_json_files_that_begin_with_a_byte_order_mark(directory: Any) -> None:
    files = {"config.json": {"model_type": "any"}, "generation_config.json": {"top_k": 5}, "quant_config.json": {}}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8-sig")
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.config == {"model_type": "any", "quantization_config": {"files": {"quant_config.json": {}}}}
    assert checkpoint.generation_config == {"top_k": 5}


def test_generation_config_can_be_left_aside(directory: Any) -> None:
    write_generation(directory, eos_token_id=9, top_k=5)
    checkpoint = Checkpoint.open(directory, generation_config="none")
    assert checkpoint.eos_tokens() == {3}
    assert checkpoint.default_params().top_k == 0


@pytest.mark.parametrize("name", ["meta/model-7b", "gone"])
def test_a_missing_directory_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} does not exist; give .* the name of a model on the hub"):
        Checkpoint.open(tmp_path / name)


def test_a_file_in_place_of_a_directory(directory: Any) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint.open(directory / "config.json")


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("text", "said"), [("{", "JSON"), ("[1]", "list"), (b"\xff\xfe{", "JSON")])
def test_a_broken_config_is_an_error(tmp_path: Path, text: str | bytes, said: str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(("stored", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, {3}), ([], set())])
def test_eos_tokens_come_from_generation_config_first(directory: Any, stored: Any, expected: Any) -> None:
    write_generation(directory, eos_token_id=stored)
    assert Checkpoint.open(directory).eos_tokens() == expected


def test_eos_tokens_come_from_config(directory: Any) -> None:
    assert Checkpoint.open(directory).eos_tokens() == {3}
    (directory / "config.json").write_text("{}")
    assert Checkpoint.open(directory).eos_tokens() == frozenset()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}, {7}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 8}}, {8}),
        ({"text_config": {"eos_token_id": [8, 9]}}, {8, 9}),
        ({"text_config": {"eos_token_id": None}}, set()),
        ({"text_config": "wrong"}, set()),
    ],
)
def test_eos_tokens_come_from_text_config_last(directory: Any, config: Any, expected: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(directory).eos_tokens() == expected


@pytest.mark.parametrize("stored", ["2", [1, "2"], 1.5, True])
def test_eos_tokens_of_a_wrong_type(directory: Any, stored: Any) -> None:
    write_generation(directory, eos_token_id=stored)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        Checkpoint.open(directory).eos_tokens()


def test_default_params_come_from_generation_config(directory: Any) -> None:
    write_generation(directory, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=None, max_new_tokens=30)
    params = Checkpoint.open(directory).default_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.max_tokens) == (0.6, 20, 0.95, 0.0, 30)


def test_default_params_of_a_model_that_does_not_sample(directory: Any) -> None:
    write_generation(directory, do_sample=False, temperature=0.6)
    assert Checkpoint.open(directory).default_params().greedy


@pytest.mark.parametrize("wrong", [{"top_p": 3}, {"temperature": "hot"}])
def test_default_params_out_of_range(directory: Any, wrong: Any) -> None:
    write_generation(directory, **wrong)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        Checkpoint.open(directory).default_params()


def test_quantization_is_an_object_of_config_or_an_error(directory: Any) -> None:
    assert Checkpoint.open(directory).quantization is None
    (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "any"}}))
    assert Checkpoint.open(directory).quantization == {"quant_method": "any"}
    (directory / "config.json").write_text(json.dumps({"quantization_config": "any"}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        _ = Checkpoint.open(directory).quantization


def test_quantization_comes_from_text_config_last(directory: Any) -> None:
    first, second = {"quant_method": "first"}, {"quant_method": "second"}
    for config, expected in (
        ({"quantization_config": first, "text_config": {"quantization_config": second}}, first),
        ({"text_config": {"quantization_config": second}}, second),
    ):
        (directory / "config.json").write_text(json.dumps(config))
        assert Checkpoint.open(directory).quantization == expected


def test_read_key_checks_types_and_bounds() -> None:
    config = {"whole": 3, "null": None, "half": 0.5, "flag": True, "text": "3"}
    assert read_key(config, "whole", int) == 3
    assert read_key(config, "whole", float) == 3.0
    assert read_key(config, "null", int, 8) == 8
    assert read_key(config, "flag", bool) is True
    for key, kind, said in [
        ("gone", int, "lacks 'gone'"),
        ("null", int, "lacks 'null'"),
        ("half", int, "must be a whole number"),
        ("flag", int, "must be a whole number"),
        ("text", float, "must be a number"),
        ("whole", bool, "must be true or false"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            read_key(config, key, kind)
    with pytest.raises(CheckpointError, match="at least 4"):
        read_key(config, "whole", int, least=4)
