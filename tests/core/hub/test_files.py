"""Which files of a repository are fetched."""

from __future__ import annotations

import pytest

from engine.core.errors import DownloadError
from engine.core.hub.files import CONFIG_ONLY, EVERYTHING, Wanted, check_readable, small_files, weight_files

NAMES = [
    *(".gitattributes", "README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "model.gguf", "modeling_x.py"),
    *("onnx/model.onnx", "original/tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool.jinja"),
]
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}


@pytest.mark.parametrize(
    ("wanted", "added"),
    [
        (CONFIG_ONLY, set()),
        (
            EVERYTHING,
            {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool.jinja"},
        ),
        (Wanted(tokenizer=False, code=True), {"modeling_x.py"}),
    ],
)
def test_small_files_are_those_of_the_wanted_kinds(wanted: Wanted, added: set[str]) -> None:
    assert set(small_files(NAMES, wanted)) == {"config.json", "generation_config.json"} | added


def test_weight_files_are_those_of_the_index_when_there_is_one() -> None:
    indexed = [
        *NAMES,
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model-9.safetensors",
    ]
    assert weight_files(indexed, lambda: INDEX) == [
        *("model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors")
    ]
    assert weight_files(NAMES, dict) == ["model.safetensors"]
    assert weight_files(["consolidated.safetensors"], dict) == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "pytorch_model.bin"], "no weights as safetensors: it has pickles (pytorch_model.bin)"),
        (["config.json", "consolidated.safetensors"], "Mistral's own format"),
        (
            [f"{letter}.gguf" for letter in "abcdef"],
            "no config.json: it has GGUF files (a.gguf, b.gguf, c.gguf, d.gguf, e.gguf and 1 more)",
        ),
        (["adapter_config.json", "adapter_model.safetensors"], "it is an adapter"),
        (["README.md"], "it has README.md"),
        ([], "it has nothing"),
    ],
)
def test_check_readable_says_what_a_repository_has_instead_of_safetensors(names: list[str], words: str) -> None:
    with pytest.raises(DownloadError) as raised:
        check_readable("org/name", names, EVERYTHING, weight_files(names, dict))
    assert words in str(raised.value)


def test_check_readable_names_the_files_that_the_index_promises_in_vain() -> None:
    with pytest.raises(DownloadError, match=r"lacks 1 of the files .* model-2\.safetensors"):
        check_readable("org/name", ["config.json", "model-1.safetensors"], EVERYTHING, ["model-2.safetensors"])
