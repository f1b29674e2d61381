"""Sorts the keys of a generation_config.json: honoured, without effect, or named in a warning.

transformers' GenerationConfig defines the keys. tests/core/weights/test_generation_config.py compares these tables with
all of its keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.core.types import SamplingParams

SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
"""Keys -> fields of SamplingParams."""

HONOURED = frozenset({*SAMPLING_KEYS, "do_sample", "eos_token_id"})

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),  # as a default it would refuse requests of fewer tokens
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": ({},),
}
"""Keys that change transformers' output, and are not honoured -> the values, besides null, that change nothing."""

WITHOUT_EFFECT = frozenset(
    {
        # of beam search, which num_beams asks for
        "early_stopping",
        "length_penalty",
        "low_memory",
        # after the logits that tokens are drawn from; only removes NaN and infinities
        "remove_invalid_values",
        "renormalize_logits",
        # speculation and cache of transformers, which leave the output as it is
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "is_assistant",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "target_lookbehind",
        "use_cache",
        "use_mtp",
        # what transformers returns
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        # tokens that the tokenizer has, too
        "bos_token_id",
        "decoder_start_token_id",
        "pad_token_id",
        "transformers_version",
    }
)
"""Keys that do not change the output of a decoder."""


def default_params(stored: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a generation_config.json. Raises InvalidRequestError for a value out of range."""
    values = {ours: stored[theirs] for theirs, ours in SAMPLING_KEYS.items() if stored.get(theirs) is not None}
    if stored.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingParams(**values)


def not_honoured(stored: Mapping[str, Any], max_len: int) -> list[str]:
    """The settings of a generation_config.json that are not used, as KEY VALUE. max_len: the model's context."""
    found = []
    for key, value in stored.items():
        if key in HONOURED | WITHOUT_EFFECT or key.startswith("_") or value is None:
            continue
        if key in NEUTRAL and value in NEUTRAL[key]:
            continue
        if key == "max_length" and isinstance(value, int) and value >= max_len:
            continue  # no more than the context holds
        text = json.dumps(value, ensure_ascii=False)
        found.append(f"{key} {text if len(text) <= 60 else text[:57] + '...'}")
    return found
