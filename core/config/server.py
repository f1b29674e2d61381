"""The settings of the server."""

from __future__ import annotations

from attrs import frozen

from engine.core.config.setting import setting


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
        "API keys, one of which clients must send as a bearer token; empty: no key is needed. Options show in lists of"
        " processes: better give keys in the environment variable ENGINE_API_KEY or in api_key_file.",
        flag="--api-key",
        secret=True,
    )
    api_key_file: str = setting(
        "", "File with further API keys, one per line; # begins a comment line.", flag="--api-key-file"
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        "Keys that open the routes of administration, which API keys do not open; empty: the routes are off. Better"
        " give keys in the environment variable ENGINE_ADMIN_API_KEY.",
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
        60.0, "Seconds for which a client may leave a waiting response unread; then its request is aborted."
    )
    request_timeout: float = setting(
        0.0,
        "Seconds from the end of the headers to the end of the response; then 504. 0: no limit.",
        flag="--request-timeout",
    )
    stream_keep_alive: float = setting(
        10.0,
        "Seconds without an event after which a stream gets a comment, so that proxies and clients do not give it up;"
        " 0: never. Before the first event as well: an error after the comment is an event, not an HTTP status.",
        flag="--stream-keep-alive",
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
        "warning", "Minimum severity that is logged.", flag="--log-level", choices=("debug", "info", "warning", "error")
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
        "Headers of requests to otlp_endpoint, as NAME=VALUE, such as the collector's key. Also"
        " OTEL_EXPORTER_OTLP_TRACES_HEADERS and OTEL_EXPORTER_OTLP_HEADERS.",
        secret=True,
    )
    otlp_certificate: str = setting(
        "",
        "PEM file of the authority that signed the certificate of otlp_endpoint; empty: the system's authorities."
        " Also OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE and OTEL_EXPORTER_OTLP_CERTIFICATE.",
    )
    otlp_resource: tuple[str, ...] = setting(
        (),
        "Attributes of this service in traces, as NAME=VALUE; service.name is engine unless given here. Also"
        " OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.",
    )
    metrics_names: str = setting(
        "engine",
        "Names at /metrics. vllm: vLLM's names, labels and buckets for the metrics that vLLM has too, so that its"
        " dashboards and autoscalers work unchanged; both: under both names.",
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
