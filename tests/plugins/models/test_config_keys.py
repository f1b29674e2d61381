"""Every key of config.json that transformers has: the same logits, or a refusal; an unknown key is named."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core.errors import CheckpointError
from engine.core.plugin_host import load_plugins
from engine.core.weights.checkpoint import Checkpoint
from engine.plugins.models.config_keys import EVERY_ROPE_TYPE, ROPE_KEYS
from engine.plugins.models.decoder import Decoder
from engine.plugins.models.llama import Llama
from engine.testing.checkpoints import OWN_WAYS, TINY, make_checkpoint
from engine.testing.model_bench import ModelBench
from tests.reference_tokens import CACHE_ARGUMENT

from .architectures import MODELS, PRE_NORM, SPARSE
from .families import FAMILIES

ALL = tuple(PRE_NORM)
WITH_TYPES = ("mistral", "qwen2", "qwen3")
QWEN = ("qwen2", "qwen3")
GEMMA = ("gemma2", "gemma3_text")
PROMPT = torch.randint(0, TINY["vocab_size"], (64,), generator=torch.Generator().manual_seed(7)).tolist()
CHUNKS = (40, 1, 1, 22)
WINDOW = 12
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ABSENT = ...
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}


FORMER_GEMMA3 = {
    "rope_theta": 8000.0,
    "rope_local_base_freq": 300.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FORMER_PHI3 = {"type": "longrope", "short_factor": [1.0, 1.2] * 4, "long_factor": [2.0, 3.0] * 4}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **parameters}}


EQUAL: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ALL, {"is_causal": True}),
    (ALL, {"model_type": ABSENT}),
    (ALL, {"architectures": None}),
    (ALL, {"hidden_act": "swish"}),
    (("llama",), {"hidden_act": "gelu"}),
    (("llama",), {"hidden_act": "gelu_pytorch_tanh"}),
    (ALL, {"hidden_act": ABSENT}),
    (ALL, {"tie_word_embeddings": ABSENT}),
    (ALL, {"attention_dropout": 0.5, "initializer_range": 0.5, "pretraining_tp": 2, "use_cache": False}),
    (ALL, {"pad_token_id": 3, "chunk_size_feed_forward": 8, "output_hidden_states": True}),
    (ALL, {"is_encoder_decoder": True, "is_decoder": True, "add_cross_attention": True}),
    (ALL, {"per_layer_config": {}, "attention_chunk_size": None, "num_experts": 0}),
    (ALL, {"partial_rotary_factor": 1.0}),
    (ALL, {"rope_theta": 5000.0}),
    (ALL, {"rope_parameters": ABSENT, "rope_theta": 5000.0}),
    (ALL, {"rope_parameters": None, "rope_scaling": None}),
    (ALL, rope(factor=8.0)),
    (ALL, rope(rope_type="linear", factor=4.0)),
    (("llama",), rope(rope_type="dynamic", factor=4.0)),
    (ALL, rope(rope_type="yarn", factor=None, original_max_position_embeddings=64)),
    (ALL, rope(rope_type="yarn", factor=4.0, mscale=1.0, original_max_position_embeddings=64)),
    (ALL, rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    (ALL, {"attn_logit_softcapping": 30.0, "logit_scale": 0.5}),
    (ALL, {"layer_types": [FULL, FULL]}),
    (ALL, {"layer_types": ["attention", "attention"]}),
    (("llama",), {"sliding_window": 512}),
    (("llama",), {"sliding_window": None}),
    (("mistral",), {"sliding_window": ABSENT}),
    (("mistral",), {"sliding_window": None}),
    (("mistral",), {"layer_types": None}),
    (("mistral",), {"layer_types": [SLIDING, SLIDING]}),
    (("mistral",), {"layer_types": [FULL, SLIDING]}),
    (QWEN, WINDOWS),
    (QWEN, {**WINDOWS, "layer_types": ABSENT}),
    (QWEN, {**WINDOWS, "layer_types": [SLIDING, FULL]}),
    (QWEN, {**WINDOWS, "layer_types": ABSENT, "use_sliding_window": False}),
    (QWEN, {**WINDOWS, "layer_types": ABSENT, "sliding_window": None}),
    (QWEN, {**WINDOWS, "layer_types": ABSENT, "sliding_window": ABSENT}),
    (GEMMA, {"layer_types": ABSENT, "hidden_activation": ABSENT}),
    (("gemma2",), {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False}),
    (("gemma2",), {"attn_logit_softcapping": ABSENT, "final_logit_softcapping": 5.0, "sliding_window": ABSENT}),
    (("gemma3_text",), {"final_logit_softcapping": 3.0}),
    (("gemma3_text",), {"rope_parameters": ABSENT, **FORMER_GEMMA3}),
    (("gemma3_text",), {"rope_parameters": ABSENT, "layer_types": ABSENT, "sliding_window_pattern": 2}),
    (("phi3",), {"sliding_window": None, "original_max_position_embeddings": ABSENT}),
    (("phi3",), {"rope_parameters": ABSENT, "rope_scaling": FORMER_PHI3}),
    (("phi3",), {"rope_parameters": ABSENT, "partial_rotary_factor": 0.5}),
    (("granite",), dict.fromkeys(("attention_multiplier", "embedding_multiplier", "logits_scaling"), ABSENT)),
    (("smollm3",), {"layer_types": ABSENT, "no_rope_layers": ABSENT, "no_rope_layer_interval": 2}),
    (("smollm3",), {"layer_types": ABSENT, "rope_parameters": ABSENT, "use_sliding_window": False}),
    (("glm4",), {"rope_parameters": ABSENT, "partial_rotary_factor": 0.25}),
    (("olmo3",), {"rope_parameters": ABSENT, "rope_theta": 7000.0, "rope_scaling": YARN, "layer_types": ABSENT}),
    (("starcoder2",), {"hidden_act": ABSENT, "sliding_window": None}),
    (("cohere2",), {"layer_types": ABSENT, "sliding_window_pattern": 2, "logit_scale": ABSENT}),
]
"""Architectures, and changes of config.json that both read the same way. Mistral starts from a window, as released."""

REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ALL, {"is_causal": False}, "is_causal: false"),
    (ALL, {"architectures": "Llama"}, 'architectures: "Llama"'),
    (ALL, {"model_type": "gemma"}, "model_type 'gemma'"),
    (ALL, {"hidden_act": "relu"}, "'relu'"),
    (ALL, {"hidden_act": None}, "None"),
    (ALL, {"tie_word_embeddings": None}, "tie_word_embeddings: null"),
    (ALL, {"attention_chunk_size": 16}, "attention_chunk_size: 16"),
    (ALL, {"per_layer_config": {"0": {"sliding_window": 8}}}, "per_layer_config"),
    (ALL, {"kv_sharing_modes": ["reuse", "own"]}, "kv_sharing_modes"),
    (ALL, {"num_local_experts": 4}, "num_local_experts: 4"),
    (ALL, {"use_mrope": True}, "use_mrope: true"),
    (ALL, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    (ALL, rope(partial_rotary_factor=0.5), "partial_rotary_factor: 0.5"),
    (ALL, rope(rope_theta=None), "rope_theta: null"),
    (ALL, {"rope_parameters": ABSENT, "rope_theta": None}, "rope_theta: null"),
    (ALL, rope(rope_type=None), "rope_type: null"),
    (ALL, {"rope_parameters": {"type": None}}, "rope_type: null"),
    (ALL, rope(rope_type="linear"), "'factor'"),
    (ALL, rope(rope_type="yarn", original_max_position_embeddings=64), "'factor'"),
    (ALL, rope(rope_type="mrope", factor=2.0), "'mrope'"),
    (ALL, {"layer_types": [CHUNKED, CHUNKED]}, "chunked_attention"),
    (ALL, {"layer_types": [FULL, CHUNKED]}, "chunked_attention"),
    (ALL, {"layer_types": [FULL]}, "each of 2 layers"),
    (ALL, {"layer_types": FULL}, "each of 2 layers"),
    (("llama",), {"layer_types": [FULL, SLIDING]}, "full attention in all layers"),
    (("llama",), {"sliding_window": WINDOW}, "sliding_window: 12"),
    (("llama",), {"mlp_bias": None}, "mlp_bias: null"),
    (("llama", "qwen3"), {"attention_bias": None}, "attention_bias: null"),
    (("mistral",), {"layer_types": [FULL, SLIDING], "sliding_window": None}, "sliding_window is null"),
    (QWEN, {"layer_types": [FULL, SLIDING]}, "use_sliding_window or sliding_window is not set"),
    (QWEN, {**WINDOWS, "layer_types": [CHUNKED, FULL]}, "chunked_attention"),
    (QWEN, {"use_sliding_window": None}, "use_sliding_window: null"),
    (QWEN, {"max_window_layers": None}, "max_window_layers: null"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
    (GEMMA, {"hidden_activation": None}, "hidden_activation: None"),
    (GEMMA, {"head_dim": ABSENT}, "'head_dim'"),
    (("gemma3_text",), {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
    (GEMMA, {"sliding_window": None}, "sliding_window is null"),
    (("gemma3_text",), rope(), "rope_parameters by kind of layer"),
    (("gemma3_text",), {"rope_parameters": {FULL: {"rope_type": "mrope"}}}, "'mrope'"),
    (("phi3",), {"attention_bias": True}, "attention_bias: true"),
    (("phi3",), rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "short_factor: a list of 8"),
    (("olmo2", "granite", "smollm3"), {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
    (("granite",), {"logits_scaling": 0}, "'logits_scaling' is 0.0"),
    (("smollm3",), {"no_rope_layers": [1]}, "0 or 1 for each of 2 layers"),
    (("smollm3",), {"layer_types": [SLIDING, FULL], "use_sliding_window": False}, "use_sliding_window or"),
]


def cases(table: list[Any]) -> list[Any]:
    found = []
    for architectures, changes, *rest in table:
        for architecture in architectures:
            name = " ".join(f"{key}={value}" for key, value in changes.items()).replace("Ellipsis", "absent")
            found.append(pytest.param(architecture, changes, *rest, id=f"{architecture} {name}"))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny checkpoint per architecture."""
    root = tmp_path_factory.mktemp("checkpoints")
    extra = {"mistral": {"sliding_window": WINDOW}}
    return {name: make_checkpoint(root / name, name, **extra.get(name, {})) for name in MODELS}


def changed(directory: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint of the same weights, and a config.json with changes."""
    target.mkdir()
    for file in directory.glob("*.safetensors"):
        (target / file.name).symlink_to(file)
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not ABSENT}
    (target / "config.json").write_text(json.dumps(config))
    return target


@torch.inference_mode()
def reference(directory: Path, model_type: str) -> torch.Tensor:
    """Logits of transformers' model, through its cache, in the chunks that the engine computes."""
    if "model_type" not in json.loads((directory / "config.json").read_text()):
        directory = changed(directory, directory / "named", {"model_type": model_type})
    library: Any = transformers  # without types
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    cache = library.DynamicCache(config=model.config)
    parts, start = [], 0
    for count in CHUNKS:
        tokens = torch.tensor([PROMPT[start : start + count]])
        parts.append(model(tokens, use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0])
        start += count
    return torch.cat(parts)


def chosen(directory: Path) -> type[Decoder]:
    """The one architecture that accepts a config.json. Raises CheckpointError, with all refusals, if none does."""
    config = Checkpoint.open(directory).config
    refusals = {name: model.refuses(config) for name, model in MODELS.items()}
    accepting = [name for name, refusal in refusals.items() if refusal is None]
    if not accepting:
        raise CheckpointError("; ".join(str(refusal) for refusal in refusals.values()))
    assert len(accepting) == 1
    return MODELS[accepting[0]]


@pytest.mark.parametrize(("architecture", "changes"), cases(EQUAL))
def test_logits_equal_transformers_with_a_key_changed(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    directory = changed(checkpoints[architecture], tmp_path / "model", changes)
    found = ModelBench(chosen(directory), directory, [PROMPT]).prompt_logits(0, CHUNKS)
    expected = reference(directory, architecture)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(("architecture", "changes", "said"), cases(REFUSED))
def test_value_that_is_not_computed_is_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str, changes: dict[str, Any], said: str
) -> None:
    directory = changed(checkpoints[architecture], tmp_path / "model", changes)
    with pytest.raises(CheckpointError) as caught:
        chosen(directory).spec(Checkpoint.open(directory).config)
    assert said in str(caught.value)


@pytest.mark.parametrize("architecture", ALL)
def test_tied_embeddings_next_to_another_head_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    directory = changed(checkpoints[architecture], tmp_path / "model", {"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight .* differ"):
        ModelBench(chosen(directory), directory, [PROMPT])


ROPES = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def with_ropes(config: dict[str, Any], ropes: dict[str, Any]) -> dict[str, Any]:
    """A config.json with other rope keys, those of the language model."""
    if "text_config" in config:
        return {**config, "text_config": with_ropes(config["text_config"], ropes)}
    return {**{key: value for key, value in config.items() if key not in ROPES}, **ropes}


@pytest.mark.parametrize(
    "ropes", [{}, {"rope_parameters": None}, {"rope_parameters": {}}, {"rope_theta": 7000.0}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_rope_keys_that_are_missing_have_the_defaults_of_transformers(name: str, ropes: dict[str, Any]) -> None:
    family, library = FAMILIES[name], transformers.AutoConfig
    cls: Any = load_plugins().models.get(family.plugin or name).load()
    kind = family.reference or name
    made = library.for_model(kind, **{**TINY, **OWN_WAYS.get(kind, {}), **family.config})
    stored = with_ropes(json.loads(made.to_json_string(use_diff=False)), ropes)
    read = json.loads(type(made).from_dict(copy.deepcopy(stored)).to_json_string(use_diff=False))
    found, expected = (
        [
            None if rope is None else (*rope.frequencies(), rope.query_growth)
            for rope in cls.parse(cls.normalized(config)).ropes
        ]
        for config in ({**stored, **family.renamed}, {**read, **family.renamed})
    )
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours[0], theirs[0])
            assert ours[1:] == theirs[1:]


def keys_of(config: Any, *sources: Any) -> set[str]:
    """Keys that a config class of transformers has, and those that these modules read from it."""
    names = {one.name for one in dataclasses.fields(config)} | {name for name in vars(config()) if name[0] != "_"}
    read: set[str] = set()
    for source in sources:
        text = inspect.getsource(source)
        read |= set(re.findall(r"\bconfig\.(\w+)\b(?!\()", text))
        read |= set(re.findall(r"getattr\(\s*(?:self\.)?\w*config,\s*[\"'](\w+)", text))
    return names | {name for name in read if name[0] != "_"}


NOT_KEYS = {"default_theta", "ignore_keys_at_rope_validation", "json", "number_of_conv_states"}
"""Attributes of the class, the name of the file in a comment, and a size of layers that are no attention."""
KEYS_WITH_IMAGES = {"image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
"""Of models with images, in the modules of their language models."""


EVERY = {**MODELS, **SPARSE}
MODELING = {
    name: f"transformers.models.{family}.modeling_{family}"
    for name, family in {**{name: name for name in EVERY}, "gemma3_text": "gemma3"}.items()
}


def walked(architecture: str, config: Any = None) -> set[str]:
    """Keys that transformers' implementation of an architecture has and reads, masks and cache included."""
    from transformers import cache_utils, masking_utils, modeling_rope_utils

    config = config or type(transformers.AutoConfig.for_model(architecture))
    model = importlib.import_module(MODELING[architecture])
    shared = (
        masking_utils.create_causal_mask,
        masking_utils.create_sliding_window_causal_mask,
        cache_utils.get_layer_types_and_kwargs,
        cache_utils.DynamicCache,
        modeling_rope_utils,
    )
    return keys_of(config, inspect.getmodule(config), model, *shared) - NOT_KEYS - KEYS_WITH_IMAGES


@pytest.mark.parametrize("architecture", EVERY)
def test_every_key_of_transformers_is_known(architecture: str) -> None:
    unknown = walked(architecture) - EVERY[architecture].keys.known
    assert not unknown, f"say in plugins/models/config_keys.py what {architecture} does with {sorted(unknown)}"


def test_walk_notices_a_new_key() -> None:
    class Next(transformers.LlamaConfig):
        attention_sinks: int = 4

    assert walked("llama", Next) - Llama.keys.known == {"attention_sinks"}


def test_every_key_of_the_rope_table_is_known() -> None:
    from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

    for kind, keys in ROPE_KEYS.items():
        source = inspect.getsource(getattr(RotaryEmbeddingConfigMixin, f"_validate_{kind}_rope_parameters"))
        tables = re.findall(r"_keys = (\{.*?\})", source, re.DOTALL)
        stored = {key for table in tables for key in re.findall(r"\"(\w+)\"", table)}
        assert {"rope_type", "rope_theta"} <= stored
        assert stored <= keys | EVERY_ROPE_TYPE, kind


@pytest.mark.parametrize("architecture", ALL)
def test_unknown_keys_are_named(architecture: str) -> None:
    config = {
        "model_type": architecture,
        "hidden_size": 64,
        "logit_scale": 0.5,
        "_attn_implementation": "sdpa",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "mrope_section": [2, 2], "beta_fast": None},
    }
    assert MODELS[architecture].unknown_keys(config) == ["logit_scale", "rope_parameters.mrope_section"]


RELEASED: dict[str, dict[str, Any]] = {
    "Llama 3.1": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
    },
    "SmolLM2": {
        "_name_or_path": "/fsx/checkpoints",
        "architectures": ["LlamaForCausalLM"],
        "is_llama_config": True,
        "model_type": "llama",
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 130000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral 7B": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "model_type": "mistral",
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 21,
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Mixtral 8x7B": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "Qwen1.5-MoE": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
}
"""config.json of released models, sizes left out."""


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_accepted_without_unknown_keys(name: str) -> None:
    config = RELEASED[name]
    model = EVERY[config["model_type"]]
    assert model.refuses(config) is None
    assert model.unknown_keys(config) == []


@pytest.mark.parametrize("architecture", MODELS)
def test_no_key_is_unknown_in_what_transformers_writes(checkpoints: dict[str, Path], architecture: str) -> None:
    assert MODELS[architecture].unknown_keys(Checkpoint.open(checkpoints[architecture]).config) == []
