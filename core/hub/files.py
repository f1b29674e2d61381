"""Chooses the files of a repository that the engine reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from engine.core.errors import DownloadError
from engine.core.weights.checkpoint import CONFIG, INDEX, PICKLES, QUANTIZATION_FILES, SINGLE, listed

CONFIGS = (CONFIG, "generation_config.json", *QUANTIZATION_FILES)
"""The files that describe a model and the quantization of its weights."""

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""The files of a tokenizer and its chat templates."""

CODE = ("*.py",)
"""Python code, which model.trust_remote_code runs."""

CONSOLIDATED = "consolidated*.safetensors"
"""Weights under Mistral's own names of tensors."""


@frozen(kw_only=True)
class Wanted:
    """The kinds of files to fetch."""

    config: bool = True
    tokenizer: bool = True
    weights: bool = True
    code: bool = False


EVERYTHING = Wanted()
CONFIG_ONLY = Wanted(tokenizer=False, weights=False)
TOKENIZER_ONLY = Wanted(config=False, weights=False)


def small_files(names: Collection[str], wanted: Wanted) -> list[str]:
    """The files of `names` to fetch besides the weights."""
    kinds = (CONFIGS if wanted.config else (), TOKENIZER if wanted.tokenizer else (), CODE if wanted.code else ())
    return [name for kind in kinds for pattern in kind for name in names if _matches(name, pattern)]


def weight_files(names: Collection[str], read_index: Callable[[], Mapping[str, Any]]) -> list[str]:
    """The safetensors files to read: those of the index, else the single file; none if there are neither.

    Other copies of the weights are left out: pickles, GGUF, ONNX, consolidated.safetensors.
    """
    if INDEX in names:
        files = read_index().get("weight_map", {}).values()
        return [INDEX, *sorted({name for name in files if isinstance(name, str)})]
    return [SINGLE] if SINGLE in names else []


def check_readable(model: str, names: Collection[str], wanted: Wanted, weights: Collection[str]) -> None:
    """Raise DownloadError, saying what to do, for a repository without a file that is wanted.

    weights: what `weight_files` returned.
    """
    if wanted.config and CONFIG not in names:
        raise DownloadError(f"{model} has no {CONFIG}: {_instead(names)}")
    if wanted.weights and not weights:
        raise DownloadError(f"{model} has no weights as safetensors: {_instead(names)}")
    if absent := [name for name in weights if name not in names]:
        raise DownloadError(f"{model} lacks {len(absent)} of the files that its {INDEX} names: {listed(absent)}")


def _instead(names: Collection[str]) -> str:
    """What a repository has that the engine does not read, and what to do about it."""
    if "adapter_config.json" in names:
        return "it is an adapter; merge it into its base model, and give the result's directory"
    if found := [name for name in names if name.endswith(".gguf")]:
        return f"it has GGUF files ({listed(found)}); give the model that they were made from"
    if found := [name for name in names if _matches(name, CONSOLIDATED)]:
        return f"it has Mistral's own format ({listed(found)}); give a copy in the Hugging Face layout"
    if found := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"it has pickles ({listed(found)}), which can run code when read and are not loaded; give a copy in"
            " safetensors, or convert it (load with transformers, then save_pretrained)"
        )
    return f"it has {listed(sorted(names))}; give a repository of a model in the Hugging Face layout"


def _matches(name: str, pattern: str) -> bool:
    """Whether a file matches a pattern of the same folder."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)
