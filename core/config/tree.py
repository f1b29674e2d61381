"""The configuration: one frozen tree, resolved once and sent unchanged to every process.

Each setting is defined here, or in server.py for [server], and nowhere else: type, default, help text, option and
aliases. The file reader (core/config/load.py), the command line (cli/options.py) and docs/configuration.md are
generated from this tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from engine.core.config.server import ServerConfig
from engine.core.config.setting import setting
from engine.core.quant.float8 import FLOAT8

AUTO = "auto"
KV_DTYPES = {"fp8": FLOAT8}
"""Short name -> dtype of keys and values."""
FEW_RUNNING = 256
"""Maximum running requests that scheduler.max_running = 0 stands for, unless the device is a large GPU."""


@frozen(kw_only=True)
class ModelConfig:
    """[model]: which checkpoint, and how to read it."""

    path: str = setting(
        "",
        "Directory of a Hugging Face checkpoint, or name of a model on the hub (ORG/NAME), which is downloaded.",
        flag="--model",
    )
    revision: str = setting("", "Branch, tag or commit of a model on the hub; empty: main.", flag="--revision")
    download_dir: str = setting(
        "",
        "Directory of models from the hub; empty: huggingface_hub's cache ($HF_HUB_CACHE, else hub in $HF_HOME).",
        flag="--download-dir",
    )
    name: str = setting(AUTO, "Architecture plugin; auto: by the checkpoint's config.json.", flag="--architecture")
    options: Mapping[str, Any] = setting({}, "Settings of the architecture plugin.")
    served_name: str = setting(
        "", "Name in the HTTP interface; empty: the name on the hub, else the directory's.", flag="--served-model-name"
    )
    tokenizer: str = setting("", "Directory or hub name of the tokenizer; empty: the checkpoint's.", flag="--tokenizer")
    chat_template: str = setting("", "File of a Jinja chat template; empty: the tokenizer's.", flag="--chat-template")
    dtype: str = setting(
        AUTO,
        "Dtype of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU.",
        flag="--dtype",
        choices=(AUTO, "float32", "bfloat16", "float16"),
    )
    max_len: int = setting(
        0, "Maximum context length in tokens; 0: the model's own.", flag="--max-len", aliases=("max_model_len",)
    )
    load_format: str = setting(
        AUTO,
        "auto: safetensors files; dummy: random weights, only config.json is read.",
        flag="--load-format",
        choices=(AUTO, "dummy"),
    )
    load_threads: int = setting(
        0, "Threads that read the weights; 0: one per processor, up to 8.", flag="--load-threads"
    )
    generation_config: str = setting(
        AUTO,
        "auto: sampling defaults and stop tokens from generation_config.json; none: ignore that file.",
        flag="--generation-config",
        choices=(AUTO, "none"),
    )
    trust_remote_code: bool = setting(
        False, "Let the tokenizer run Python code that comes with the checkpoint.", flag="--trust-remote-code"
    )
    seed: int = setting(0, "Seed of dummy weights.", flag="--weights-seed")


@frozen(kw_only=True)
class AttentionConfig:
    """[attention]: the attention backend."""

    name: str = setting(
        AUTO,
        "Attention backend; PREFILL,DECODE: one for prefill and one for decode.",
        flag="--attention",
        aliases=("attention_backend",),
    )
    options: Mapping[str, Any] = setting(
        {}, "Settings of the attention backend; of two: prefill.KEY and decode.KEY.", flag="--attention-option"
    )


@frozen(kw_only=True)
class QuantConfig:
    """[quant]: the quantization method of the weights."""

    name: str = setting(AUTO, "Quantization method; auto: the checkpoint's.", flag="--quant", aliases=("quantization",))
    options: Mapping[str, Any] = setting({}, "Settings of the quantization method.", flag="--quant-option")


@frozen(kw_only=True)
class SchedulerConfig:
    """[scheduler]: the scheduling policy and the budget of a step."""

    name: str = setting(AUTO, "Scheduling policy.", flag="--scheduler")
    options: Mapping[str, Any] = setting({}, "Settings of the scheduling policy.", flag="--scheduler-option")
    max_batch_tokens: int = setting(
        0,
        "Maximum tokens per step; longer prompts are computed in chunks. 0: 8192 on a GPU, 2048 on a CPU.",
        flag="--max-batch-tokens",
        aliases=("max_num_batched_tokens",),
    )
    max_running: int = setting(
        0,
        "Maximum running requests, all in one step. 0: 1024 on a GPU of 70 GB or more without a speculator, else 256;"
        " fewer for a model with states (Mamba) that would take more than a quarter of the memory, or half of the"
        " engine's share of it.",
        flag="--max-running",
        aliases=("max_num_seqs",),
    )
    overlap: str = setting(
        AUTO,
        "Plan the next step while one runs; auto: on if the executor runs asynchronously.",
        flag="--overlap",
        choices=(AUTO, "on", "off"),
    )


@frozen(kw_only=True)
class ExecutorConfig:
    """[executor]: where the model runs."""

    name: str = setting(AUTO, "Executor.", flag="--executor")
    options: Mapping[str, Any] = setting({}, "Settings of the executor.", flag="--executor-option")
    device: str = setting(AUTO, "auto (a GPU if there is one), cpu, cuda or cuda:N.", flag="--device")
    tensor_parallel: int = setting(
        1,
        "Tensor parallel ranks: devices that shard the weights and heads of each layer, from executor.device on.",
        flag="--tp",
        aliases=("tensor_parallel_size",),
    )
    expert_parallel: bool = setting(
        False,
        "Share the experts of a mixture of experts among the tensor parallel ranks: each rank has some of them whole,"
        " instead of a shard of each.",
        flag="--expert-parallel",
        aliases=("enable_expert_parallel",),
    )
    overlap_sums: str = setting(
        AUTO,
        "Sum over the tensor parallel ranks next to computation in steps with many tokens; auto: on 2 or 4 GPUs that"
        " reach each other's memory; off: never.",
        flag="--overlap-sums",
        choices=(AUTO, "off"),
    )
    threads: int = setting(
        0,
        "CPU threads for tensor operations; 0: PyTorch's default, but no more than the cores of the CPU quota.",
        flag="--threads",
    )
    thread_wait: str = setting(
        AUTO,
        "How idle CPU threads wait for the next operation. passive: asleep; active: spinning, which wastes the time of"
        " busy cores; auto: as OMP_WAIT_POLICY says, else spinning for 0.1 ms, then asleep.",
        flag="--thread-wait",
        choices=(AUTO, "passive", "active"),
    )
    kernels: str = setting(
        AUTO,
        "fused: Triton kernels for norms, rotary embedding, activation, few-row linears and sampling; plain: PyTorch"
        " operations; auto: fused on a GPU.",
        flag="--kernels",
        choices=(AUTO, "fused", "plain"),
    )
    kernel_cache: str = setting(
        "",
        "Directory of the autotuning results; empty: engine/kernels under $XDG_CACHE_HOME or ~/.cache.",
    )
    graphs: str = setting(
        AUTO,
        "on: CUDA graphs for decode steps, and piecewise CUDA graphs, split at attention, for steps with prefill of up"
        " to max_graph_tokens; decode: for decode steps only; auto: on where device and attention backend allow it.",
        flag="--graphs",
        choices=(AUTO, "on", "decode", "off"),
    )
    max_graph_tokens: int = setting(
        0,
        "Maximum tokens of a step with prefill that is replayed as piecewise CUDA graphs. 0: chosen at the start, at"
        " least 1024: the size from which on a step takes the device longer than the host, or all sizes if a full step"
        " may take the host as long.",
        flag="--max-graph-tokens",
    )


@frozen(kw_only=True)
class CacheConfig:
    """[cache]: the paged KV cache."""

    block_size: int = setting(16, "Tokens per KV block.", flag="--block-size", aliases=("page_size",))
    memory: str = setting(
        AUTO,
        'Size of the KV cache, as "2GiB" or "500MB"; auto: what memory_fraction leaves after weights and activations.',
        flag="--kv-memory",
    )
    memory_fraction: float = setting(
        0.0,
        "Share of the device's free memory for weights, activations and KV cache; 0: 0.9 of a GPU's, 0.5 of a CPU's.",
        flag="--memory-fraction",
        aliases=("gpu_memory_utilization",),
    )
    prefix_caching: bool = setting(
        True,
        "Reuse the KV blocks of equal prefixes.",
        flag="--prefix-caching",
        aliases=("enable_prefix_caching",),
    )
    dtype: str = setting(
        AUTO,
        "Dtype of keys and values; auto: what the checkpoint asks for, else that of the activations.",
        flag="--kv-dtype",
        aliases=("kv_cache_dtype",),
        choices=(AUTO, "float32", "bfloat16", "float16", FLOAT8, *KV_DTYPES),
    )
    metrics: bool = setting(
        False,
        "Measure how long KV blocks stay and when they are reused, hits by tenant, and fragmentation.",
        flag="--kv-metrics",
        aliases=("kv_cache_metrics",),
    )
    metrics_sample: float = setting(
        0.01,
        "Share of KV blocks whose times are measured, drawn at each allocation.",
        flag="--kv-metrics-sample",
        aliases=("kv_cache_metrics_sample",),
    )


@frozen(kw_only=True)
class KVEventsConfig:
    """[kv_events]: events of the prefix cache, published for routers over ZeroMQ in the format of vLLM."""

    endpoint: str = setting(
        "",
        "Where to publish the blocks that enter and leave the prefix cache, as tcp://127.0.0.1:5557, tcp://*:5557 (all"
        " interfaces) or ipc:///PATH; empty: nowhere. Readers see all prompts and outputs.",
        flag="--kv-events",
    )
    replay_endpoint: str = setting(
        "", "Where readers can ask for earlier batches of events; empty: nowhere.", flag="--kv-events-replay"
    )
    connect: bool = setting(
        False, "Connect to endpoint, where a router listens, instead of listening there.", flag="--kv-events-connect"
    )
    topic: str = setting(
        "",
        "Topic of all messages, as kv@POD@MODEL for llm-d; {rank} stands for the rank.",
        flag="--kv-events-topic",
    )
    encoding: str = setting(
        "map",
        "How an event is encoded. map: as vLLM from 0.24 on; array: as before, for readers that know nothing else.",
        choices=("map", "array"),
    )
    rank: int = setting(
        0,
        "Number of this engine among several: added to ports, and published in each batch. The server adds to it the"
        " number of the replica.",
    )
    buffer_steps: int = setting(10_000, "Maximum batches kept for replays.")
    buffer_bytes: int = setting(64 * 2**20, "Maximum size of the batches kept for replays, bytes.")
    max_queue: int = setting(1000, "Maximum batches that wait to be sent; a further one is dropped.")
    high_water_mark: int = setting(
        1000, "Maximum batches that wait for one reader; further ones are dropped for this reader."
    )


@frozen(kw_only=True)
class ParserConfig:
    """[parser]: how the server finds reasoning and tool calls in the output."""

    name: str = setting(AUTO, "Output parser of chats; auto: by the tokenizer's chat template.", flag="--parser")
    options: Mapping[str, Any] = setting({}, "Settings of the output parser.", flag="--parser-option")


@frozen(kw_only=True)
class GrammarConfig:
    """[grammar]: the library that makes outputs match a grammar, and the limits of a grammar."""

    name: str = setting(AUTO, "Grammar plugin.", flag="--grammar")
    options: Mapping[str, Any] = setting({}, "Settings of the grammar plugin.", flag="--grammar-option")
    max_chars: int = setting(65536, "Maximum length of a grammar, characters.")
    max_depth: int = setting(64, "Maximum nesting of brackets in a grammar.")
    compile_timeout: float = setting(10.0, "Seconds that a grammar may take to compile; a slower one is refused.")


@frozen(kw_only=True)
class SpeculatorConfig:
    """[speculator]: speculative decoding: what proposes the next tokens of a sequence, which a step then verifies."""

    name: str = setting("", "Speculator plugin; empty: no speculation.", flag="--speculator")
    options: Mapping[str, Any] = setting({}, "Settings of the speculator.", flag="--speculator-option")
    model: str = setting(
        "",
        "Checkpoint of a speculator that runs on the device: directory, or name on the hub (ORG/NAME). Empty: the"
        " speculator has no checkpoint of its own.",
        flag="--speculator-model",
    )
    quant: str = setting(
        AUTO,
        "Quantization plugin of speculator.model. auto: the one that the checkpoint's config.json names.",
        flag="--speculator-quant",
    )
    max_drafts: int = setting(
        5, "Maximum draft tokens per sequence and step.", flag="--max-drafts", aliases=("num_speculative_tokens",)
    )
    length: str = setting(
        AUTO,
        "auto: verify as many draft tokens as pay, by their measured acceptance and the times of steps, which are"
        " measured at start; fixed: verify as many as are proposed.",
        flag="--draft-length",
        choices=(AUTO, "fixed"),
    )


@frozen(kw_only=True)
class PluginsConfig:
    """[plugins]: which installed plugins are loaded."""

    allow: tuple[str, ...] = setting((), "Load only these entry points and the built-ins; empty: all.")
    deny: tuple[str, ...] = setting((), "Do not load these entry points.")
    prefer: tuple[str, ...] = setting(
        (),
        "Installed distributions whose plugins auto ranks together with the built-in ones, by preference. auto takes"
        " plugins of other distributions only where no built-in one can serve.",
    )


@frozen(kw_only=True)
class RooflineConfig:
    """[roofline]: metrics of what steps compute and move, next to what the device could."""

    metrics: bool = setting(
        True,
        "Count FLOPs and bytes of each step, and the least time they take at the device's peaks.",
        flag="--roofline-metrics",
    )
    bandwidth: float = setting(
        0.0,
        "Peak memory bandwidth of a device, TB/s; 0: by the data sheet of known GPUs, else unknown.",
        flag="--peak-bandwidth",
    )
    flops: float = setting(
        0.0,
        "Peak rate of dense matrix products in the model's dtype, TFLOP/s; 0: by the data sheet of known GPUs for 16"
        " bits, else unknown.",
        flag="--peak-flops",
    )
    flops8: float = setting(
        0.0,
        "The same for products of 8-bit numbers; 0: by the data sheet of known GPUs, else that of the model's dtype.",
        flag="--peak-flops8",
    )


@frozen
class OptionPlace:
    """Where an option of a plugin was given."""

    origin: str
    """The file, or the option of the command line."""
    directory: str = ""
    """The absolute directory from which a relative path starts; empty: the current one."""


@frozen(kw_only=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    quant: QuantConfig = QuantConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    cache: CacheConfig = CacheConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    parser: ParserConfig = ParserConfig()
    grammar: GrammarConfig = GrammarConfig()
    speculator: SpeculatorConfig = SpeculatorConfig()
    plugins: PluginsConfig = PluginsConfig()
    roofline: RooflineConfig = RooflineConfig()
    server: ServerConfig = ServerConfig()
    option_places: Mapping[str, OptionPlace] = attrs.field(factory=dict, eq=False, repr=False)
    """Dotted key -> place, of the options of plugins. No setting: needed when a plugin's options_class is known."""


def sections() -> tuple[attrs.Attribute[Any], ...]:
    """The sections of the configuration, as fields of EngineConfig."""
    return tuple(one for one in attrs.fields(EngineConfig) if attrs.has(type(one.default)))
