"""What an architecture does with each key of a config.json: compute with the key, accept few values, or ignore the key.

transformers defines the keys. tests/plugins/models/test_config_keys.py compares these tables with all the keys that
transformers' classes have and read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from engine.core.layers import refuses_rope
from engine.plugins.models.decoder_config import LAYER_TYPES, rope_config

CORE = frozenset({"architectures", "dtype", "eos_token_id", "model_type", "quantization_config", "torch_dtype"})
"""Read by core, for any architecture."""

DECODER = frozenset(
    {
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "vocab_size",
    }
)
"""Read for every decoder."""

NULLABLE = frozenset(
    {
        "architectures",
        "dtype",
        "eos_token_id",
        "head_dim",
        "layer_types",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "torch_dtype",
    }
)
"""Keys for which null has a meaning; `rope_theta` only next to a table that has one."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "is_causal": (True,),
    "kv_sharing_modes": (None,),
    "n_routed_experts": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "per_layer_config": (None, {}),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
}
"""Keys that change what transformers, or a checkpoint's original program, computes -> values that change nothing."""

WITHOUT_EFFECT = frozenset(
    {
        # training, and the initial values of weights
        "attention_dropout",
        "initializer_range",
        "pretraining_tp",
        # how transformers runs and returns results
        "attn_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "use_cache",
        # tokens that the tokenizer has, too; the row of a padding token is as stored
        "bos_token_id",
        "pad_token_id",
        # other heads than the language model's, and other networks than decoders
        "add_cross_attention",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "problem_type",
        # where the file comes from
        "auto_map",
        "is_llama_config",
        "name_or_path",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    }
)
"""Keys that do not change logits."""

ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "longrope": frozenset(
        {"attention_factor", "factor", "long_factor", "original_max_position_embeddings", "short_factor"}
    ),
    "llama3": frozenset({"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}
"""Rope type -> keys of the table of rope parameters that are read, next to those of every type."""
EVERY_ROPE_TYPE = frozenset({"partial_rotary_factor", "rope_theta", "rope_type", "type"})

MAX_SHOWN = 60
"""Characters of a value in a refusal."""


@frozen(kw_only=True)
class ConfigKeys:
    """The keys of config.json that one architecture knows."""

    read: frozenset[str] = DECODER | CORE
    """Keys that the architecture computes with."""
    nullable: frozenset[str] = NULLABLE
    """Those of `read` that may be null."""
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    """Keys that the architecture accepts with these values only."""
    without_effect: frozenset[str] = WITHOUT_EFFECT
    rope_keys: frozenset[str] = EVERY_ROPE_TYPE
    """Keys of rope parameters that are known for every rope type."""
    ropes_by_type: bool = False
    """Whether rope parameters are tables by kind of layer."""

    def reading(self, *keys: str, nullable: Sequence[str] = ()) -> ConfigKeys:
        """This table, and more keys that are read. nullable: those of them that may be null."""
        neutral = {key: values for key, values in self.neutral.items() if key not in keys}
        return evolve(self, read=self.read.union(keys), nullable=self.nullable.union(nullable), neutral=neutral)

    def accepting(self, **values: tuple[Any, ...]) -> ConfigKeys:
        """This table, and more keys that are accepted with these values only."""
        return evolve(self, neutral={**self.neutral, **values})

    def ignoring(self, *keys: str) -> ConfigKeys:
        """This table, and more keys that do not change logits."""
        return evolve(self, read=self.read.difference(keys), without_effect=self.without_effect.union(keys))

    def reading_rope(self, *keys: str) -> ConfigKeys:
        """This table, and more keys of rope parameters that are known."""
        return evolve(self, rope_keys=self.rope_keys.union(keys))

    def with_ropes_by_type(self) -> ConfigKeys:
        """This table, for rope parameters by kind of layer."""
        return evolve(self, ropes_by_type=True)

    @property
    def known(self) -> frozenset[str]:
        """All keys."""
        return self.read | self.neutral.keys() | self.without_effect

    def refuses(self, config: Mapping[str, Any]) -> str | None:
        """Return a refusal, naming a key, its value and what would work. None: all values can be computed."""
        for key, accepted in self.neutral.items():
            if key in config and config[key] not in accepted:
                return _not_computed(key, config[key], accepted)
        for key in sorted(self.read - self.nullable):
            if key in config and config[key] is None:
                return f"config.json has {key}: null, which says nothing; give a value, or leave the key out"
        if self.ropes_by_type:
            return self._refuses_ropes_by_type(config)
        return refuses_rope(config) or self._refuses_rope_table(config)

    def unknown(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Keys of a config.json that nothing is computed with, sorted; those of its rope parameters too."""
        found = {key for key in config if key not in self.known and not key.startswith("_")}
        if self.ropes_by_type:
            tables = config.get("rope_parameters") or {}
            found |= {
                key for kind in tables for key in self._unknown_rope_keys(f"rope_parameters.{kind}", tables[kind])
            }
            return sorted(found | self._unknown_rope_keys("rope_scaling", config.get("rope_scaling")))
        for name in ("rope_scaling", "rope_parameters"):
            if config.get(name):
                found |= self._unknown_rope_keys(name, config[name])
                break  # the other table is not read
        return sorted(found)

    def _refuses_ropes_by_type(self, config: Mapping[str, Any]) -> str | None:
        tables = config.get("rope_parameters") or {}
        if not isinstance(tables, Mapping) or not all(kind in LAYER_TYPES for kind in tables):
            return f"config.json must have rope_parameters by kind of layer ({', '.join(LAYER_TYPES)}), not {tables!r}"
        for kind in LAYER_TYPES:
            if not isinstance(tables.get(kind) or {}, Mapping):
                return f"the rope parameters of {kind} must be a table, not {tables[kind]!r}"
            own = rope_config(config, kind, 1.0)
            refusal = refuses_rope(own) or self._refuses_rope_table(own)
            if refusal is not None:
                return refusal
        return None

    def _refuses_rope_table(self, config: Mapping[str, Any]) -> str | None:
        """Refuses a null rope_type or rope_theta, and a partial_rotary_factor that is not computed."""
        table = config.get("rope_scaling") or config.get("rope_parameters") or {}
        accepted = self.neutral.get("partial_rotary_factor")
        if accepted is not None and table.get("partial_rotary_factor") not in accepted:
            return _not_computed("partial_rotary_factor", table["partial_rotary_factor"], accepted)
        if table.get("rope_type", table.get("type", "default")) is None:
            return "config.json has rope_type: null; give default, or the type that the model was trained with"
        theta = table["rope_theta"] if "rope_theta" in table else config.get("rope_theta", ...)
        if theta is None:
            return "config.json has rope_theta: null; give the number that the model was trained with"
        return None

    def _unknown_rope_keys(self, name: str, table: Mapping[str, Any] | None) -> set[str]:
        """Keys of a table of rope parameters that are not read, as NAME.KEY."""
        if not table:
            return set()
        known = self.rope_keys | ROPE_KEYS[str(table.get("rope_type") or table.get("type") or "default")]
        return {f"{name}.{key}" for key in table if key not in known and table[key] is not None}


def _not_computed(key: str, value: Any, accepted: tuple[Any, ...]) -> str:
    choices = " or ".join(json.dumps(one) for one in accepted)
    text = json.dumps(value)
    return (
        f"config.json has {key}: {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...'}, which this"
        f" architecture does not compute; use a checkpoint that has {choices} there, or lacks the key"
    )
