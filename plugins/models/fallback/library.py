"""Finds the architecture of a config.json in the transformers library and builds its modules without weights."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from engine.plugins.models.fallback.errors import RefusedError

LENGTH_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""Attributes of a config class that may hold the longest context, in order of preference."""
DROPPED_KEYS = ("quantization_config", "auto_map", "attn_implementation", "_attn_implementation", "use_cache")
"""Keys of config.json that the engine reads itself, or that say how transformers runs the model."""


def version() -> str:
    """The library and its version, as errors name them."""
    library: Any = importlib.import_module("transformers")
    return f"transformers {library.__version__}"


def causal_lms() -> Mapping[str, str]:
    """Every model_type of the library with a causal language model -> the class of this model."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    return dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that config.json names, or that the library has for its model_type. Raises RefusedError."""
    named, model_type = config.get("architectures"), str(config.get("model_type"))
    known = causal_lms()
    if model_type not in known:
        raise RefusedError(
            f"has model_type {model_type!r}, for which {version()} has no causal language model; a newer version may"
            f" have one{_own_code(config)}"
        )
    if not named:
        return known[model_type]
    if not (isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)):
        raise RefusedError(f"has architectures {named!r}, where one name is needed")
    if named[0] not in known.values():
        raise RefusedError(
            f"is no causal language model of {version()}, which has {known[model_type]} for model_type"
            f" {model_type!r}{_own_code(config)}"
        )
    return str(named[0])


def _own_code(config: Mapping[str, Any]) -> str:
    """A hint for a checkpoint that brings its own code; empty for others."""
    if "auto_map" not in config:
        return ""
    return (
        "; the code that the checkpoint brings (auto_map) is never run: to serve it, read it, and write a model plugin"
        " of it"
    )


def model_class(config: Mapping[str, Any]) -> type[Any]:
    """The library's class of a config.json. Raises RefusedError."""
    name = architecture_of(config)
    library: Any = importlib.import_module("transformers")
    cls: type[Any] = getattr(library, name)
    return cls


def library_config(config: Mapping[str, Any], cls: type[Any]) -> Any:
    """The library's config object of a config.json. Raises RefusedError for a network that is not a decoder alone."""
    library: Any = importlib.import_module("transformers")
    stored = copy.deepcopy({key: value for key, value in config.items() if key not in DROPPED_KEYS})
    try:
        made: Any = library.CONFIG_MAPPING[config["model_type"]].from_dict(stored)
    except Exception as error:  # of the library's validation
        raise RefusedError(f"has a config.json that {version()} rejects: {error}") from error
    if getattr(made, "is_encoder_decoder", False):
        raise RefusedError("is an encoder-decoder, and only decoders are served")
    if getattr(made, "vision_config", None) is not None or getattr(made, "audio_config", None) is not None:
        raise RefusedError("is multimodal, and only decoders of text alone are served")
    if not getattr(cls, "_supports_attention_backend", False):
        raise RefusedError("does not call attention by the library's interface, so that the KV cache cannot serve it")
    return made


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that the library's config class does not have."""
    library: Any = importlib.import_module("transformers")
    cls = library.CONFIG_MAPPING[config["model_type"]]
    known = {*cls().to_dict(), *getattr(cls, "attribute_map", {}), *inspect.signature(cls).parameters}
    former = {"architectures", "torch_dtype", "rope_scaling", "rope_theta", "transformers_version", *DROPPED_KEYS}
    return sorted(key for key in config if key not in known | former and not key.startswith("_"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings about how it would generate."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def build_empty(config: Mapping[str, Any], dtype: torch.dtype, attention: str, experts: str) -> Any:
    """The library's model of a config.json on the meta device, in inference mode.

    attention, experts: names of the implementations in the library's interfaces. Raises RefusedError.
    """
    cls = model_class(config)
    made = library_config(config, cls)
    with _quiet(), torch.device("meta"):
        try:
            model = cls._from_config(made, dtype=dtype, attn_implementation=attention)
            if model._can_set_experts_implementation():
                model.set_experts_implementation(experts)
        except Exception as error:  # of the library's code, for values that it does not expect
            raise RefusedError(f"cannot be built by {version()}: {type(error).__name__}: {error}") from error
        model.tie_weights()
    model.eval()
    model.requires_grad_(False)
    parameters = inspect.signature(decoder_of(model).forward).parameters
    if "position_ids" not in parameters:
        raise RefusedError("takes no positions of tokens (position_ids), which batches of many sequences need")
    _fix_rope(model)
    return model


def decoder_name(model: Any) -> str:
    """The attribute of a model that holds the decoder. Raises RefusedError without an output layer above."""
    named = [name for name in (model.base_model_prefix, "model") if isinstance(model._modules.get(name), nn.Module)]
    if not named or model.get_output_embeddings() is None:
        raise RefusedError("has no decoder below an output layer")
    return named[0]


def decoder_of(model: Any) -> Any:
    """The decoder of a model: tokens and positions to hidden states."""
    return model._modules[decoder_name(model)]


def longest(model: Any) -> int:
    """The longest context that the model serves, tokens. Raises RefusedError if its config does not say."""
    config = model.config.get_text_config()
    stated = [value for key in LENGTH_KEYS if isinstance(value := getattr(config, key, None), int)]
    if not stated:
        raise RefusedError(f"names no longest context; give config.json {LENGTH_KEYS[0]}")
    fixed = [int(module.engine_longest) for module in model.modules() if hasattr(module, "engine_longest")]
    return min([stated[0], *fixed])


def _fix_rope(model: Any) -> None:
    """Keep rotary embeddings at the frequencies of short contexts where those of long ones depend on the batch.

    The library takes dynamic and longrope frequencies by the longest sequence of the batch, so that a sequence's tokens
    would depend on its neighbours. Contexts are limited to the length that the first frequencies serve.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in named):
            continue
        if isinstance(kinds, dict):
            raise RefusedError("has rope that changes with the context's length, by kind of layer")
        parameters = module.config.rope_parameters or {}
        original = parameters.get("original_max_position_embeddings") if kinds == "longrope" else None
        module.engine_longest = int(original or module.config.max_position_embeddings)
        module.forward = MethodType(inspect.unwrap(type(module).forward), module)
