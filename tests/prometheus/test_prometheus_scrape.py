"""A real Prometheus scrapes a real server under load; `make prometheus-test` runs these tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .prometheus_server import ROOT, Prometheus, executable, filled, load, scraping, until

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(executable() is None, reason="$PROMETHEUS names none: run `make prometheus-test`"),
]

QUERIES = json.loads((Path(__file__).parent / "vllm_queries.json").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "engine.json").read_text(encoding="utf-8"))
NO_DATA = {
    "vllm:lora_requests_info": "there are no LoRA adapters; vLLM has it only with some",
    "vllm:gpu_prefix_cache_hit_rate": "vLLM has removed it",
    "vllm:gpu_prefix_cache_hits_total": "vLLM has removed it",
    "vllm:gpu_prefix_cache_queries_total": "vLLM has removed it",
    "vllm:gpu_cache_usage_perc": "vLLM has removed it",
    "vllm:num_incoming_requests_total": "production-stack's router counts it",
    "vllm:current_qps": "production-stack's router counts it",
    "vllm:healthy_pods_total": "production-stack's router counts it",
    "router_cpu_usage_percent": "production-stack's router counts it",
    "router_memory_usage_percent": "production-stack's router counts it",
    "router_disk_usage_percent": "production-stack's router counts it",
    "vllm:prefix_cache_hits{": "the counter ends in _total, as vLLM's does",
    'vllm:num_requests_waiting{model="': "the label is model_name, as vLLM's is",
}
"""Part of a query that finds nothing -> why."""


DASHBOARD_OPTIONS = (
    *("--kv-metrics", "--kv-metrics-sample", "1", "--max-len", "256", "--kv-memory", "2MiB"),
    *("--peak-bandwidth", "0.02", "--peak-flops", "0.1"),
)
"""Options of a server that has data for every panel: what is off by default, and a KV cache that evicts blocks."""


@contextmanager
def scraped(names: str, replicas: int, *options: str) -> Iterator[tuple[str, Prometheus]]:
    """A server with the demo model under load, and the Prometheus that scrapes it: (name of the model, Prometheus)."""
    given = ["--port", "0", "--metrics-names", names, "--replicas", str(replicas), "--threads", "1", *options]
    command = [sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "serve", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://([0-9.]+:\d+)", line) for line in server.stdout)
            target = next(match[1] for match in found if match)
            model = httpx.get(f"http://{target}/v1/models", timeout=30).json()["data"][0]["id"]
            command_line = executable()
            assert command_line is not None
            with scraping(command_line, target) as prometheus, load(f"http://{target}", model):
                prefix = "vllm:" if names == "vllm" else "engine_"
                busy = f"sum(rate({prefix}e2e_request_latency_seconds_count[10s])) > 0"
                until(lambda: len(prometheus.query(busy)) > 0)
                until(lambda: len(prometheus.query(f"count_over_time({prefix}num_requests_running[60s]) > 12")) > 0)
                yield model, prometheus
        finally:
            server.terminate()


def has_data(series: list[dict[str, Any]]) -> bool:
    return any(one["value"][1] != "NaN" for one in series)


@pytest.mark.timeout(240)
def test_the_queries_of_vllms_dashboards_and_scalers_find_data_on_two_replicas() -> None:
    with scraped("vllm", replicas=2) as (model, prometheus):
        empty = [
            query
            for source in QUERIES
            for query in source["queries"]
            if not has_data(prometheus.query(filled(query, model)))
        ]
    unexplained = [query for query in empty if not any(part in query for part in NO_DATA)]
    assert not unexplained
    assert all(any(part in query for query in empty) for part in NO_DATA), "one of NO_DATA finds data now"


@pytest.mark.timeout(240)
def test_every_panel_of_our_dashboard_shows_data() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    with scraped("engine", 1, *DASHBOARD_OPTIONS) as (model, prometheus):
        empty = [one for one in expressions if not has_data(prometheus.query(filled(one, model)))]
    assert len(expressions) > 20
    assert not empty
