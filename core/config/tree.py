"""The configuration: one frozen tree, resolved once and sent unchanged to every process.

Each setting is defined here and nowhere else: type, default, help text, option and aliases. The file reader
(core/config/load.py), the command line (cli/options.py) and docs/configuration.md are generated from this tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from engine.core.quant.float8 import FLOAT8

AUTO = "auto"
KV_DTYPES = {"fp8": FLOAT8}
"""Short name -> dtype of keys and values."""


def setting(
    default: Any,
    text: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """Define one setting.

    flag: its command-line option; None: the file or --set sets it. aliases: other names, as other engines call the
    setting; each is a key of the section and, with dashes, an option. choices: all possible values; never names of
    plugins, which are open. secret: the value is never shown.
    """
    metadata = {"help": text, "flag": flag, "aliases": aliases, "choices": choices, "secret": secret}
    if isinstance(default, dict):
        return attrs.field(factory=dict, metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


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
        256, "Maximum running requests, all in one step.", flag="--max-running", aliases=("max_num_seqs",)
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
        "on: CUDA graphs for decode steps, and piecewise CUDA graphs, split at attention, for small steps with prefill;"
        " decode: for decode steps only; auto: on where device and attention backend allow it.",
        flag="--graphs",
        choices=(AUTO, "on", "decode", "off"),
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
    """[grammar]: the library that makes outputs match a grammar, and what a grammar may be at most."""

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
        "Checkpoint of a speculator that runs on the device: directory, or name on the hub (ORG/NAME). Empty: it has"
        " none of its own.",
        flag="--speculator-model",
    )
    quant: str = setting(
        AUTO,
        "Quantization plugin of that checkpoint. auto: what the checkpoint's config.json names.",
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
        "Installed distributions whose plugins auto considers next to the built-in ones, by preference; plugins of"
        " others only where no built-in one can serve.",
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


@frozen(kw_only=True)
class ServerConfig:
    """[server]: the HTTP interface and its limits."""

    host: str = setting("127.0.0.1", "Address to listen on.", flag="--host")
    port: int = setting(8000, "Port to listen on; 0: any free one.", flag="--port")
    uds: str = setting("", "Path of a Unix domain socket to listen on instead of host and port.", flag="--uds")
    ssl_certfile: str = setting(
        "", "PEM file of the TLS certificate and its chain; empty: plain HTTP.", flag="--ssl-certfile"
    )
    ssl_keyfile: str = setting(
        "", "PEM file of the certificate's private key; empty: it is in ssl_certfile.", flag="--ssl-keyfile"
    )
    ssl_keyfile_password: str = setting(
        "", "Password of the private key; better in a file of settings.", flag="--ssl-keyfile-password", secret=True
    )
    api_workers: int = setting(
        0,
        "Front-end processes, which serve HTTP and tokenize; 0: one per 4 cores, from 1 to 4.",
        flag="--api-workers",
    )
    replicas: int = setting(
        1,
        "Engines, each with the whole model: each on its own GPU (or executor.tensor_parallel GPUs), from"
        " executor.device on; on a CPU they share the cores.",
        flag="--replicas",
    )
    replica_restarts: int = setting(
        5,
        "Restarts of a dead replica, also of the only one, before the supervisor gives it up; the count starts again"
        " after 10 minutes without a failure. 0: no restart.",
        flag="--replica-restarts",
    )
    replica_restart_pause: float = setting(
        1.0, "Seconds before a dead replica is restarted; doubled each time, up to a minute."
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Keys of which clients must send one as a bearer token; empty: none. Options show in lists of processes:"
        " better give keys in the environment variable ENGINE_API_KEY or in api_key_file.",
        flag="--api-key",
        secret=True,
    )
    api_key_file: str = setting(
        "", "File with further API keys, one per line; # begins a comment line.", flag="--api-key-file"
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        "Keys of which one opens the routes of administration, which no other API key opens; empty: the routes are"
        " off. Better give keys in the environment variable ENGINE_ADMIN_API_KEY.",
        flag="--admin-api-key",
        secret=True,
    )
    profile_dir: str = setting(
        "",
        "Directory in which POST /start_profile writes traces, seen by all ranks; empty: profiling is off.",
        flag="--profile-dir",
    )
    profile_max_steps: int = setting(200, "Maximum steps of a profile.")
    profile_max_seconds: float = setting(60.0, "Maximum seconds of a profile, also if no one stops it.")
    rate_limit: int = setting(
        0,
        "Maximum POST requests per minute and API key (without keys: in all); a further one gets 429. 0: no limit.",
        flag="--rate-limit",
    )
    concurrency_limit: int = setting(
        0,
        "Maximum POST requests in progress per API key (without keys: in all); a further one gets 429. 0: no limit.",
        flag="--concurrency-limit",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names under which clients may address the server, as api.example.com, *.example.com or * (any); empty: any,"
        " but without an API key and on a loopback address only localhost and addresses in numbers.",
        flag="--allowed-hosts",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may use the server (CORS), as https://example.com or * (any).",
        flag="--allowed-origins",
    )
    allowed_methods: tuple[str, ...] = setting(
        ("*",), "Methods that pages of allowed_origins may use; *: all.", flag="--allowed-methods"
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "Headers that pages of allowed_origins may send; *: all.", flag="--allowed-headers"
    )
    allow_credentials: bool = setting(
        False, "Let pages of allowed_origins send cookies and other credentials.", flag="--allow-credentials"
    )
    shutdown_timeout: float = setting(
        30.0, "Seconds that running requests get to finish after SIGTERM.", flag="--shutdown-timeout"
    )
    health_timeout: float = setting(
        60.0, "Seconds without an iteration of the engine loop, or without a probe's step, before /health answers 503."
    )
    engine_timeout: float = setting(
        360.0,
        "Seconds without an iteration of the engine loop before the supervisor restarts the engine process; 0: never."
        " Give more than the longest step takes, and than an executor's step_timeout.",
    )
    health_interval: float = setting(
        60.0, "Idle seconds after which the engine computes one token as a self-check; 0: only on demand."
    )
    openapi: bool = setting(True, "Describe the API at /openapi.json.", flag="--openapi")
    page: bool = setting(True, "Serve a page at / to talk to the model in a browser.", flag="--page")
    front_end_timeout: float = setting(
        30.0, "Seconds without an iteration of a front end's event loop before the supervisor replaces the front end."
    )
    max_connections: int = setting(
        8192,
        "Maximum client connections per front end, fewer if the limit of open files (ulimit -n) is too low. A further"
        " one closes the connection that has been idle longest, or gets 503.",
        flag="--max-connections",
    )
    keep_alive_timeout: float = setting(
        60.0,
        "Seconds until a connection without a request is closed.",
        flag="--keep-alive-timeout",
        aliases=("timeout_keep_alive",),
    )
    header_timeout: float = setting(
        30.0, "Seconds from the first byte of a request to the end of its headers; then 408."
    )
    body_timeout: float = setting(120.0, "Seconds from the end of the headers to the end of the body; then 408.")
    write_timeout: float = setting(
        60.0, "Seconds in which a client reads nothing of what waits for it before its request is aborted."
    )
    request_timeout: float = setting(
        0.0,
        "Seconds from the end of the headers to the end of the response; then 504. 0: no limit.",
        flag="--request-timeout",
    )
    max_header_bytes: int = setting(
        64 * 2**10,
        "Maximum size of a request's URL and headers, and of a chunked body's trailers and extensions, bytes.",
        aliases=("h11_max_incomplete_event_size",),
    )
    max_headers: int = setting(100, "Maximum headers of a request.", aliases=("h11_max_header_count",))
    access_log: str = setting(
        "off",
        "One entry per request on standard error, for people or as JSON.",
        flag="--access-log",
        choices=("off", "line", "json"),
    )
    log_format: str = setting(
        "text",
        "Form of the log entries of all processes: for people, or a JSON object per line.",
        flag="--log-format",
        choices=("text", "json"),
    )
    phase_times: bool = setting(
        False, "Measure the CPU time of the front ends by phase, for /metrics and `engine profile phases`."
    )
    gc_freeze: bool = setting(
        True, "Exclude the objects made at the start from garbage collections, in all processes of the server."
    )
    log_level: str = setting(
        "warning", "Least severity that is logged.", flag="--log-level", choices=("debug", "info", "warning", "error")
    )
    otlp_endpoint: str = setting(
        "",
        "Where OpenTelemetry traces of requests are sent, by OTLP over HTTP, as http://localhost:4318; a URL without a"
        " path gets /v1/traces. Empty: requests are not traced. Also OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and"
        " OTEL_EXPORTER_OTLP_ENDPOINT.",
        flag="--otlp-endpoint",
        aliases=("otlp_traces_endpoint",),
    )
    trace_sample: float = setting(
        1.0,
        "Share of the requests that are traced, 0 to 1; for a request with a traceparent its sampled flag decides. Also"
        " OTEL_TRACES_SAMPLER_ARG, with OTEL_TRACES_SAMPLER.",
        flag="--trace-sample",
    )
    otlp_headers: tuple[str, ...] = setting(
        (),
        "Headers of what is sent to otlp_endpoint, as NAME=VALUE: keys of the collector. Also"
        " OTEL_EXPORTER_OTLP_TRACES_HEADERS and OTEL_EXPORTER_OTLP_HEADERS.",
        secret=True,
    )
    otlp_certificate: str = setting(
        "",
        "PEM file of the authority that signed the certificate of otlp_endpoint; empty: those that the system trusts."
        " Also OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE and OTEL_EXPORTER_OTLP_CERTIFICATE.",
    )
    otlp_resource: tuple[str, ...] = setting(
        (),
        "Attributes of this service in traces, as NAME=VALUE; service.name is engine unless given here. Also"
        " OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.",
    )
    metrics_names: str = setting(
        "engine",
        "Names at /metrics. vllm: vLLM's names, labels and buckets for what vLLM has too, so that its dashboards and"
        " autoscalers work unchanged; both: under both names.",
        flag="--metrics-names",
        choices=("engine", "vllm", "both"),
    )
    max_body_bytes: int = setting(8 * 2**20, "Maximum request body, bytes.")
    max_body_values: int = setting(
        65536, "Maximum strings, lists and objects in a request body; of numbers, 8 times as many are allowed."
    )
    max_n: int = setting(64, "Maximum choices per prompt.")
    max_prompts: int = setting(256, "Maximum prompts per completion request.")
    max_logprobs: int = setting(20, "Maximum top logprobs per position.")
    max_stop: int = setting(16, "Maximum stop strings per request.")
    max_stop_chars: int = setting(256, "Maximum length of a stop string, characters.")
    max_logit_bias: int = setting(1024, "Maximum tokens in logit_bias.")
    max_salt_chars: int = setting(256, "Maximum length of cache_salt and prompt_cache_key, characters.")
    token_cache_bytes: int = setting(
        64 * 2**20,
        "Memory of a front end for the tokens of chats, so that the next turn of a chat tokenizes only what is new,"
        " bytes; 0: none.",
    )
    max_waiting: int = setting(4096, "Maximum requests in the engine; a further one gets 503.")


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
