"""Derives what configuration, checkpoint and device determine together: shape, dtypes, kernels, graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from attrs import evolve

from engine.core.attention.base import AttentionSpec, GraphSupport
from engine.core.config.tree import AUTO, FEW_RUNNING, KV_DTYPES, EngineConfig
from engine.core.errors import ConfigError, PluginError
from engine.core.extras import install_command
from engine.core.host import Host
from engine.core.models.base import ModelSpec, StateShape
from engine.core.plugin_host.faults import expect
from engine.core.plugin_host.guard import owner_of
from engine.core.quant.float8 import FLOAT8, has_float8
from engine.core.runner.memory import memory_share
from engine.core.speculators.base import SpeculatorSpec

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.device import DeviceInfo
    from engine.core.models.base import Model
    from engine.core.quant.base import QuantMethod

_log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that keep matrix products efficient; more make sequences that decode wait longer."""
MANY_RUNNING = 1024
"""Sequences in a step of a GPU with LARGE_MEMORY. More spread the fixed costs of a step further, but gain little: from
a few hundred rows on, reading the weights takes less time than multiplying."""
LARGE_MEMORY = 70 * 10**9
"""Bytes of device memory from which on a KV cache usually has room for MANY_RUNNING sequences, and their logits (1.5
GiB for a vocabulary of 128,000) matter little."""

STATES_SHARE = 0.25
"""Maximum share of the device's memory for the states of running sequences, where `max_running` is not set. More
sequences gain little: reading their states then takes longer than reading the weights."""
STATES_SHARE_OF_BUDGET = 0.5
"""Maximum share for these states of the memory that the engine may use; weights and activations need the rest."""


def settle(config: EngineConfig, device: DeviceInfo, *, drafts: bool = False) -> EngineConfig:
    """Fill in the settings that depend on the device; called once, before anything else reads the configuration.

    drafts: whether there is a speculator that the configuration does not name.
    """
    scheduler = config.scheduler
    if not scheduler.max_batch_tokens:
        scheduler = evolve(scheduler, max_batch_tokens=BATCH_TOKENS[device.type])
    if not scheduler.max_running:
        is_large = device.type == "cuda" and device.memory_bytes >= LARGE_MEMORY
        # With drafts a sequence has several rows of logits (6 GiB at 1024), and drafts do not pay in large batches.
        many = is_large and not (drafts or config.speculator.name)
        scheduler = evolve(scheduler, max_running=MANY_RUNNING if many else FEW_RUNNING)
    return evolve(config, scheduler=scheduler)


def fit_running(config: EngineConfig, model_spec: ModelSpec, device: DeviceInfo) -> EngineConfig:
    """Lower max_running until the states of that many sequences take at most STATES_SHARE of the device's memory, and
    STATES_SHARE_OF_BUDGET of what the engine may use of it.

    Call only if max_running is not set. States are allocated for all running sequences.
    """
    from engine.core.attention.state_pool import StatePool

    caches = [cache for cache in model_spec.layer_caches if isinstance(cache, StateShape)]
    ranks = config.executor.tensor_parallel
    each = sum(StatePool.bytes_per_sequence(cache.on_rank(ranks)) for cache in caches)
    available = device.memory_bytes
    if device.type == "cpu":
        each *= ranks  # all ranks share the host's memory
        # A GPU is not asked: that would make a CUDA context in this process, and the model may run in others.
        available = min(available, Host().free_memory())
    share = min(STATES_SHARE, STATES_SHARE_OF_BUDGET * memory_share(config, device))
    scheduler, memory = config.scheduler, int(available * share)
    if not memory or each * (scheduler.max_running + 1) <= memory:
        return config
    fits = max(memory // each - 1, 1)  # one more row is for padding
    return evolve(config, scheduler=evolve(scheduler, max_running=min(fits, scheduler.max_running)))


def shape_of(model: type[Model], checkpoint: Mapping[str, Any]) -> ModelSpec:
    """The shape that a model class reads from a config.json.

    Raises CheckpointError, and PluginError for a class that cannot describe its shape.
    """
    shape = model.spec(checkpoint)
    if not isinstance(shape, ModelSpec):
        raise PluginError(
            f"{owner_of(model)} answers spec() with {shape!r}; it must be an engine.core.models.ModelSpec"
        )
    if len(shape.sliding_windows) != shape.num_layers:
        raise PluginError(
            f"{owner_of(model)} answers spec() with sliding_windows of {len(shape.sliding_windows)} layers for "
            f"{shape.num_layers}; give one number or None for each layer"
        )
    if len(shape.layer_caches) not in (0, shape.num_layers):
        raise PluginError(
            f"{owner_of(model)} answers spec() with layer_caches of {len(shape.layer_caches)} layers for "
            f"{shape.num_layers}; give a KVShape or a StateShape for each layer, or none at all"
        )
    if shape.sinks and len(shape.sinks) != shape.num_layers:
        raise PluginError(
            f"{owner_of(model)} answers spec() with sinks of {len(shape.sinks)} layers for {shape.num_layers}; give"
            " True or False for each layer, or () if none has sinks"
        )
    return shape


def max_len(config: EngineConfig, model_spec: ModelSpec) -> int:
    """Longest context in tokens. Raises ConfigError for one beyond what the model supports."""
    wanted, most = config.model.max_len, max(model_spec.max_len, model_spec.extended_max_len)
    if wanted > most:
        raise ConfigError(
            f"model.max_len (--max-len) is {wanted}, but this model was made for {most} tokens; "
            f"give at most {most}, or 0 for {'all of them' if most == model_spec.max_len else model_spec.max_len}"
        )
    return wanted or model_spec.max_len


def speculator_spec(config: EngineConfig, model_spec: ModelSpec) -> SpeculatorSpec:
    """The model and the limits that a speculator proposes for. Raises ConfigError as `max_len`."""
    return SpeculatorSpec(
        vocab_size=model_spec.vocab_size,
        max_len=max_len(config, model_spec),
        max_drafts=config.speculator.max_drafts,
        target=model_spec,
    )


def refuses_ranks(model_spec: ModelSpec, ranks: int) -> str | None:
    """Why this number of ranks cannot shard the model's heads and states, and which numbers can; None if it can.

    Query heads and states are sharded evenly; KV heads are sharded evenly too, or replicated evenly over the ranks.
    """
    heads, kv_heads = model_spec.num_heads, model_spec.num_kv_heads
    shapes = {(heads, kv_heads)} if not model_spec.layer_caches else set()
    divided: set[int] = set()
    for cache in model_spec.layer_caches:
        if isinstance(cache, StateShape):
            divided |= cache.sharded_sizes
        else:
            shapes.add((cache.num_heads, cache.num_heads if cache.latent else cache.num_kv_heads))

    def fits(number: int) -> bool:
        return all(size % number == 0 for size in divided) and all(
            heads % number == 0 and (kv_heads % number == 0 or number % kv_heads == 0) for heads, kv_heads in shapes
        )

    if fits(ranks):
        return None
    shared = [f"{heads} query heads and {kv_heads} key and value heads"] if shapes else []
    if divided:
        shared.append(f"states of {', '.join(map(str, sorted(divided)))} rows")
    most = heads if shapes else max(divided)
    possible = ", ".join(str(number) for number in range(1, most + 1) if fits(number))
    return (
        f"{ranks} ranks cannot share this model's {' and '.join(shared)} evenly; these numbers of ranks can: {possible}"
    )


def resolve_dtype(config: EngineConfig, checkpoint: Mapping[str, Any], device: DeviceInfo) -> str:
    """Dtype of weights and activations; auto: on a GPU the checkpoint's (float32 if unnamed), on a CPU float32."""
    if config.model.dtype != AUTO:
        return config.model.dtype
    if device.type == "cpu":
        return "float32"
    for table in (checkpoint, checkpoint.get("text_config") or {}):
        stored = table.get("dtype") or table.get("torch_dtype")
        if stored:
            dtype = str(stored).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ConfigError(f"the checkpoint's dtype is {dtype}; choose --dtype {', '.join(DTYPES)}")
            return dtype
    return "float32"


def resolve_kv_dtype(
    config: EngineConfig,
    dtype: str,
    checkpoint: Mapping[str, Any],
    quant: type[QuantMethod[Any]],
    device: DeviceInfo,
) -> str:
    """Dtype of keys and values; auto: what the checkpoint asks for if the device supports it, else `dtype`."""
    wanted = config.cache.dtype
    if wanted != AUTO:
        return KV_DTYPES.get(wanted, wanted)
    if device.type == "cuda" and not has_float8(device):
        return dtype
    asked = quant.kv_dtype(checkpoint.get("quantization_config"))
    known = (*DTYPES, FLOAT8)
    expect(asked is None or asked in known, owner_of(quant), "kv_dtype()", asked, f"None or one of {', '.join(known)}")
    return asked or dtype


def attention_spec(
    model_spec: ModelSpec, config: EngineConfig, dtype: str, max_len: int, kv_dtype: str, ranks: int = 1
) -> AttentionSpec:
    """The attention that one of `ranks` ranks computes for this model under this configuration."""
    return AttentionSpec(
        num_layers=model_spec.num_layers,
        num_heads=model_spec.num_heads // ranks,
        num_kv_heads=max(model_spec.num_kv_heads // ranks, 1),
        head_dim=model_spec.head_dim,
        scale=model_spec.scale,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=config.cache.block_size,
        max_len=max_len,
        sliding_windows=model_spec.sliding_windows,
        softcap=model_spec.softcap,
        sinks=model_spec.sinks,
    )


def fused_kernels(config: EngineConfig, device: DeviceInfo) -> bool:
    """Whether layers use Triton kernels. Raises ConfigError where Triton kernels are required but cannot run."""
    wanted = config.executor.kernels
    installed = find_spec("triton") is not None
    if wanted == AUTO:
        return device.type == "cuda" and installed
    if wanted != "fused":
        return False
    if not installed:
        raise ConfigError(
            "executor.kernels (--kernels) is fused, but Triton is not installed; use --kernels plain, or install it"
            f" with `{install_command('triton')}`"
        )
    if device.type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            raise ConfigError(
                "executor.kernels (--kernels) is fused, but Triton has no compiler for a CPU, only an interpreter for"
                " tests (TRITON_INTERPRET=1); use --kernels plain or auto"
            )
    return True


def use_graphs(
    config: EngineConfig, attention: AttentionBackend[Any, Any] | None, model: Model, device: DeviceInfo
) -> bool:
    """Whether decode steps are replayed as CUDA graphs. attention: None if no layer of the model has any.

    Raises ConfigError where graphs are required but impossible, and PluginError for an invalid `graphs` of the backend.
    """
    if config.executor.graphs == "off":
        return False
    known = get_args(GraphSupport)
    if attention is not None and attention.graphs not in known:
        raise PluginError(
            f"{type(attention).__name__} has set graphs = {attention.graphs!r}; it must be one of {', '.join(known)}"
        )
    obstacle = None
    if device.type != "cuda":
        obstacle = f"{device.torch_name} has no CUDA graphs"
    elif attention is not None and attention.graphs == "none":
        obstacle = f"{type(attention).__name__} computes on the host values that change from step to step"
    elif model.no_graphs is not None:
        obstacle = f"{type(model).__name__} {model.no_graphs}"
        if config.executor.graphs == AUTO:
            _log.warning("steps run without CUDA graphs: %s", obstacle)
    if obstacle is not None and config.executor.graphs != AUTO:
        raise ConfigError(
            f"graphs were asked for, but {obstacle}; use --graphs auto, or another backend, model or device"
        )
    return obstacle is None
