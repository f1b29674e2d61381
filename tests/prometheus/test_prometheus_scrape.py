"""A real Prometheus scrapes a real server under load; `make prometheus-test` runs these tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from .prometheus_server import ROOT, Prometheus, executable, filled, load, scraping, selectors, until

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(executable() is None, reason="$PROMETHEUS names none: run `make prometheus-test`"),
]

QUERIES = json.loads((Path(__file__).parent / "vllm_queries.json").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "engine.json").read_text(encoding="utf-8"))
LABEL_VALUES = re.compile(r"label_values\((?:(.+), *)?(\w+)\)")
NO_SERIES = {
    r"vllm:lora_requests_info": "there are no LoRA adapters; vLLM has it only with some",
    r"vllm:(nixl_|num_requests_kv_fetch_by_stage)": "KV caches are not sent to other servers",
    r"vllm:(simple_)?kv_offload_": "KV blocks are not offloaded",
    r"vllm:sleep_mode_operation_duration_seconds": "there is no sleep mode",
    r"vllm:rl_weight_update_operation_duration_seconds": "weights are not updated while serving",
    r"vllm:gpu_(cache_usage_perc|prefix_cache_)": "vLLM has removed it",
    r"vllm:(cpu_cache_usage_perc|num_requests_swapped|time_per_output_token_seconds)": "vLLM has removed it",
    r"vllm:(prefix_cache_hits|prefix_cache_queries|num_preemptions)\b": "the counter ends in _total, as vLLM's does",
    r"vllm:(request_success|prompt_tokens|generation_tokens)\b": "the counter ends in _total, as vLLM's does",
    r'vllm:num_requests_waiting{model="': "the label is model_name, as vLLM's is",
    r'vllm:\w+{(pod=~"\.\*|job="vllm-)(prefill|decode)': "prefill and decode do not run in servers of their own",
    r"(vllm:(num_incoming_requests|current_qps|healthy_pods)|router_)": "production-stack's router counts it",
    r"lmcache:": "LMCache counts it",
    r"(llm_d_|inference_(objective|extension|pool)_)": "llm-d's scheduler counts it",
    r'up{job=~?"(gaie-|\.\*epp)': "llm-d's scheduler is a job of its own",
    r"wva_": "llm-d's autoscaler counts it",
    r"nyann_": "llm-d's load generator counts it",
    r"(DCGM_|nvidia_gpu_|node_infiniband_)": "exporters of the hardware measure it",
}
"""Beginning of the selectors that find no series -> why."""
NO_DATA = {
    "vllm:external_prefix_cache_queries_total": "there is no cache outside the process, and the counter stays 0",
    "vllm:mm_cache_queries_total": "inputs are text, and the counter stays 0",
}
"""Part of a query that finds its series and yet no data -> why."""
KV_METRICS = ("--kv-metrics", "--kv-metrics-sample", "1", "--max-len", "256", "--kv-memory", "2MiB")
"""Options of a server whose KV cache is so small that it evicts blocks all the time."""
SPECULATION = ("--speculator", "ngram", "--draft-length", "fixed")
"""Options of a server whose requests verify drafts."""
DASHBOARD_OPTIONS = (*KV_METRICS, "--peak-bandwidth", "0.02", "--peak-flops", "0.1")
"""Options of a server that has data for every panel."""


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


class Findings:
    """Asks Prometheus queries, and keeps which find no series or no data."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._series: dict[str, bool] = {}
        """Selector -> whether there are such series."""
        self.no_series: set[str] = set()
        """Selectors."""
        self.no_data: set[str] = set()
        """Queries with series for all their selectors, or for all those on one side of an `or`."""

    def ask(self, query: str, *, alert: bool = False) -> None:
        """alert: the query finds nothing as long as all is well."""
        variable = LABEL_VALUES.fullmatch(query)
        if variable:
            series, label = variable.groups()
            found = (series is None or self._found(series)) and bool(self._prometheus.label_values(label, series))
            expected = series is None or self._found(series)
        else:
            sides = [[self._found(one) for one in selectors(side)] for side in query.split(" or ")]
            expected = any(map(all, sides)) and not alert
            found = expected and has_data(self._prometheus.query(query))
        if expected and not found:
            self.no_data.add(query)

    def _found(self, selector: str) -> bool:
        if selector not in self._series:
            self._series[selector] = bool(self._prometheus.query(selector))
            if not self._series[selector]:
                self.no_series.add(selector)
        return self._series[selector]


def asked(source: dict[str, Any], kind: str, model: str) -> Iterator[str]:
    """The queries of a source, once for each value of its own variables. kind: queries or alerts."""
    for query in source.get(kind, ()):
        own = [name for name in source.get("variables", ()) if f"${name}" in query]
        for values in product(*(source["variables"][name] for name in own)):
            yield filled(query, model, **dict(zip(own, values, strict=True)))


@pytest.mark.timeout(240)
def test_the_queries_of_vllms_dashboards_and_scalers_find_data_on_two_replicas() -> None:
    with scraped("vllm", 2, *KV_METRICS, *SPECULATION) as (model, prometheus):
        until(lambda: has_data(prometheus.query("rate(vllm:kv_block_reuse_gap_seconds_count[10s]) > 0")))
        findings = Findings(prometheus)
        for source in QUERIES:
            for query in asked(source, "queries", model):
                findings.ask(query)
            for query in asked(source, "alerts", model):
                findings.ask(query, alert=True)
    unexplained = {one for one in findings.no_series if not any(re.match(part, one) for part in NO_SERIES)}
    assert not unexplained
    assert not {query for query in findings.no_data if not any(part in query for part in NO_DATA)}
    unused = [part for part in NO_SERIES if not any(re.match(part, one) for one in findings.no_series)]
    unused += [part for part in NO_DATA if not any(part in query for query in findings.no_data)]
    assert not unused, "these find what they ask for now, or are not asked for any more"


@pytest.mark.timeout(240)
def test_every_panel_of_our_dashboard_shows_data() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    with scraped("engine", 1, *DASHBOARD_OPTIONS) as (model, prometheus):
        findings = Findings(prometheus)
        for one in (*expressions, *variables):
            findings.ask(filled(one, model))
    assert len(expressions) > 20
    assert not findings.no_series | findings.no_data
