"""Tables of benchmark results for README.md and docs/, made of the reports in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markdown_text import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REFERENCES = ROOT / "benchmarks" / "references.json"
METHODS = {"none": "bfloat16", "fp8": "fp8", "int8": "int8", "w4a16": "4 bits, groups of 128"}
"""Method in the names of result files -> in tables."""


def load_result(name: str) -> dict[str, Any] | None:
    """A report in benchmarks/results; None if there is none of this name."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def transformers_table() -> str:
    """The engine next to transformers on a CPU."""
    report = load_result("cpu-transformers")
    if report is None:
        return ""
    rows = [
        (row["metric"], number(row["value"]), number(row["baseline"]), f"{row['value'] / row['baseline']:.2f} x")
        for row in report["rows"]
        if row.get("baseline")
    ]
    baseline = report["rows"][0]["baseline_name"]
    columns = ("output tokens per second", "engine", baseline, "ratio")
    return section("On a CPU", f"The demo model. {where(report)}", [table(columns, rows)])


def compared_tables() -> str:
    """Each model's figures on the H200 next to those of vLLM and SGLang; only models with a result."""
    references = json.loads(REFERENCES.read_text(encoding="utf-8"))
    parts = []
    for key, model in references["models"].items():
        report = load_result(f"h200-{key.replace(':', '-')}")
        if report is not None:
            settings = report["settings"]
            floor = settings.get("weights_floor_ms")
            reading = f" Reading the weights once takes {number(floor)} ms at this rate." if floor else ""
            lead = f"{where(report)} Roofline: {settings['ceilings']}.{reading}"
            parts.append(f"### {model['title']}\n\n{lead}\n\n{compared(report, model['rows'], references['versions'])}")
    return section("Next to vLLM and SGLang", references["source"], parts)


def served_tables() -> str:
    """Figures of the HTTP server on the H200 next to those of vLLM; only models with a result."""
    references = json.loads(REFERENCES.read_text(encoding="utf-8"))
    versions = {"vllm": references["versions"]["vllm"]}
    parts = []
    for key, model in references["server"].items():
        report = load_result(f"h200-serve-{key}")
        if report is not None:
            parts.append(
                f"### {model['title']}, served\n\n{where(report)}\n\n{compared(report, model['rows'], versions)}"
            )
    text = "Streaming completions over HTTP, 512 tokens in, 128 out, server and load on one machine."
    return section("The HTTP server", text, parts)


LABELS = {"start-up": "first start of the engine on a new machine, without imports, s"}
"""Metric -> its label, where the name says too little."""


def compared(report: dict[str, Any], references: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """A table of those rows of a report that have a reference."""
    measured = {(row["metric"], row["case"]): row for row in report["rows"]}
    rows = []
    for reference in references:
        row = measured.get((reference["metric"], reference["case"]))
        if row is None:
            continue
        smaller = reference["unit"] in ("ms", "s", "cores")
        others = [reference[name] for name in versions if reference[name] is not None]
        best = (min if smaller else max)(others)
        rows.append(
            (
                LABELS.get(reference["metric"]) or label(reference["metric"], reference["case"], reference["unit"]),
                number(row["value"]),
                *(number(reference[other]) if reference[other] is not None else "" for other in versions),
                f"{best / row['value'] if smaller else row['value'] / best:.2f} x",
                f"{row['share']:.0%}" if row["share"] is not None else "",
            )
        )
    return table(("", "engine", *versions.values(), "against the better", "of roofline"), rows)


def methods_tables() -> str:
    """Each model's figures by quantization method, side by side."""
    metrics = ("decode step", "prefill", "output tokens a second", "start-up")
    parts = []
    for model, title in {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-0.6b": "Qwen3-0.6B"}.items():
        found = {title: load_result(f"h200-{model}-{quant}") for quant, title in METHODS.items()}
        reports = {method: report for method, report in found.items() if report is not None}
        if len(reports) < len(METHODS):
            continue
        values = {
            (row["metric"], row["case"], row["unit"], method): row["value"]
            for method, report in reports.items()
            for row in report["rows"]
        }
        rows = [
            (
                label(metric, case, unit),
                *(number(values[key]) if (key := (metric, case, unit, method)) in values else "" for method in reports),
            )
            for metric, case, unit in dict.fromkeys(key[:3] for key in values)
            if metric in metrics and not (metric == metrics[2] and case.startswith("batch"))
        ]
        commits = {method: report["commit"][:8] for method, report in reports.items()}
        measured = where(reports["bfloat16"])
        if len(set(commits.values())) > 1:
            first = commits["bfloat16"]
            others = [f"{method} {commit}" for method, commit in commits.items() if commit != first]
            measured = f"{measured.removesuffix('.')}; {', '.join(others)}."
        parts.append(f"### {title}\n\n{measured}\n\n{table(('', *reports), rows)}")
    text = "The same workloads as in [performance](performance.md), next to vLLM and SGLang."
    return section("Speed by method", text, parts)


def ablation_table() -> str:
    """What each optimization is worth."""
    report = load_result("h200-ablation")
    if report is None:
        return ""
    text = f"{report['settings']['model']}, one setting changed at a time. {where(report)}"
    return section("What each optimization is worth", text, [by_case(report, number)])


LOAD_METRICS = {
    "output tokens a second, steady state": "steady state",
    "output tokens a second, whole load": "whole load",
    "bound, one after the other, attention at 85 % of bandwidth": "serial bound at 85 %",
    "bound, one after the other, attention at 97 % of bandwidth": "at 97 %",
    "bound, prompts next to attention": "bound with overlap",
    "goal": "goal",
}
"""Metrics of benchmarks/ten_loads.py -> columns."""


def ten_loads_table() -> str:
    """The loads that TensorRT-LLM publishes, with their bounds."""
    report = load_result("h200-ten-loads")
    if report is None:
        return ""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(row["case"], {})[row["metric"]] = row
    shown = [metric for metric in LOAD_METRICS if any(metric in metrics for metrics in found.values())]
    others = report["settings"].get("commits", {})
    rows = []
    for case, metrics in found.items():
        rate = next((metrics[metric] for metric in shown[:2] if metric in metrics), None)
        if rate is None:  # a profile
            continue
        share, baseline = rate.get("share"), rate.get("baseline")
        cells = (number(metrics[metric]["value"]) if metric in metrics else "" for metric in shown)
        published = number(baseline) if baseline is not None else ""
        commit = (others.get(case, report["commit"]),) if others else ()
        rows.append((case, *cells, published, f"{share:.0%}" if share is not None else "", *commit))
    head = ("IN/OUT", *(LOAD_METRICS[metric] for metric in shown), "TensorRT-LLM, published", "of the serial bound")
    head += ("commit",) if others else ()
    text = f"Output tokens per second. {where(report)} Ceilings: {report['settings']['ceilings']}."
    return section("Ten loads next to their bounds", text, [table(head, rows)])


SERVED = {1: "h200-serve-llama-3.1-8b", 2: "h200-serve-llama-3.1-8b-tp2", 4: "h200-serve-llama-3.1-8b-tp4"}
"""Results of one model served, by number of GPUs."""
SERVED_METRICS = ("output tokens a second", "TTFT p50", "TPOT p50", "CPU cores of the server")


def shape_sweep_table() -> str:
    """Random shapes next to the nearest shapes of known models."""
    return _sweep_table("h200-shape-sweep", "Random shapes next to known ones")


def near_sweep_table() -> str:
    """Random shapes next to near shapes of round sizes."""
    return _sweep_table("h200-near-sweep", "Random shapes next to near ones")


def _sweep_table(name: str, title: str) -> str:
    report = load_result(name)
    if report is None:
        return ""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in report["rows"]:
        found.setdefault(row["case"], {}).setdefault(row["metric"], []).append(row)
    rows = []
    for case, metrics in found.items():
        [time], [ratio] = metrics["time"], metrics["time over predicted time"]
        near = "; ".join(f"{one['baseline_name']} ({one['share']:.0%})" for one in metrics["time of a neighbour"])
        regret = "".join(f"{one['value']:.2f}" for one in metrics.get("regret", []))
        times = (number(time["value"]), number(ratio["baseline"]), f"{time['share']:.0%}")
        rows.append((case, *times, near, f"{ratio['value']:.2f}", regret))
    head = ("case", "us", "predicted, us", "of the floor", "neighbours (of their floors)", "ratio", "regret")
    settings = report["settings"]
    text = f"{settings['summary']}. Seed {settings['seed']}. {where(report)} Ceilings: {settings['ceilings']}."
    return section(title, text, [table(head, rows)])


def ranks_table() -> str:
    """Steps and serving of a model that several devices share, next to one device."""
    report = load_result("h200-x4-tensor-parallel")
    if report is None:
        return ""
    steps: dict[tuple[str, str], dict[int, float]] = {}
    for row in report["rows"]:
        ranks, case = row["case"].split(" x, ")
        steps.setdefault((label(row["metric"], case, row["unit"]), row["unit"]), {})[int(ranks)] = row["value"]
    served: dict[tuple[str, str], dict[int, float]] = {}
    reports = {ranks: found for ranks, name in SERVED.items() if (found := load_result(name)) is not None}
    for ranks, one in reports.items():
        for row in one["rows"]:
            if row["metric"] in SERVED_METRICS:
                name = label(row["metric"], row["case"], row["unit"])
                served.setdefault((name, row["unit"]), {})[ranks] = row["value"]
    text = f"{report['settings']['model']}, bfloat16, {report['settings']['inputs']} tokens in. {where(report)}"
    commits = ", ".join(f"{one['commit']} ({ranks})" for ranks, one in reports.items())
    as_served = f"The same model served, 512 tokens in, 128 out, at commits {commits}:"
    return section("Tensor parallel", text, [by_ranks(steps), as_served, by_ranks(served)])


def by_ranks(values: dict[tuple[str, str], dict[int, float]]) -> str:
    """A table of figures, (name, unit), by number of GPUs."""
    counts = sorted({ranks for each in values.values() for ranks in each})
    rows = []
    for (name, unit), each in values.items():
        gain = ""
        if len(each) == len(counts) and unit != "cores":
            ratio = each[counts[-1]] / each[counts[0]]
            gain = f"{1 / ratio if unit == 'ms' else ratio:.2f} x"
        rows.append((name, *(number(each[ranks]) if ranks in each else "" for ranks in counts), gain))
    return table(("", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in counts), "gain"), rows)


def startup_table() -> str:
    """Seconds to the first token by phase, two columns per result: the first start, and the median of later ones."""
    reports = [
        (file.stem.removeprefix("h200-startup-"), json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(RESULTS.glob("h200-startup-*.json"))
    ]
    if not reports:
        return ""
    phases = list(dict.fromkeys(row["metric"] for _, report in reports for row in report["rows"]))
    columns = [(name, case) for name, _ in reports for case in ("first start", "later start")]
    spent = {(name, row["case"], row["metric"]): row["value"] for name, report in reports for row in report["rows"]}
    rows = [
        (phase, *(number(spent[*column, phase]) if (*column, phase) in spent else "" for column in columns))
        for phase in phases
    ]
    text = (
        "Seconds from the start of the process to the first token, imports included, by phase: of the first start, with"
        f" empty caches of kernels, and of the median of later ones (random weights). {where(reports[0][1])}"
    )
    return section("Start-up", text, [table(("", *(f"{name}, {case}" for name, case in columns)), rows)])


def ring_table() -> str:
    """Latencies of the ring and of other transports."""
    report = load_result("ring")
    if report is None:
        return ""
    settings = report["settings"]
    text = (
        f"One writer, {settings['readers']} readers, {settings['bytes']} bytes, {settings['cpus']} virtual processors. "
        f"{report['machine']}, {report['date']}, commit {report['commit']}."
    )
    return f"{text}\n\n{by_case(report, '{:.3g}'.format)}"


def perplexity_table() -> str:
    """Perplexity and size of the demo model by quantization method."""
    parts = []
    for name in ("cpu-quant-perplexity", "h200-quant-perplexity"):
        report = load_result(name)
        if report is None:
            continue
        values = {(row["case"], row["metric"]): row["value"] for row in report["rows"]}
        cases = list(dict.fromkeys(row["case"] for row in report["rows"]))
        first = values[cases[0], "perplexity"]
        rows: list[tuple[str, ...]] = [
            (
                case,
                f"{values[case, 'perplexity']:.3f}",
                f"{values[case, 'perplexity'] / first - 1:+.2%}",
                f"{values[case, 'size']:.1f}",
            )
            for case in cases
        ]
        rows += [(case, "not measured", "", "") for case in report["settings"].get("refused", {})]
        settings = report["settings"]
        lead = f"Calibrated by {settings['calibration']}; arithmetic in {settings['arithmetic']}. {where(report)}"
        parts.append(f"{lead}\n\n{table(('', 'perplexity', 'against bf16', 'MB'), rows)}")
    return "\n\n".join(parts)


def timeline_figure() -> str:
    """The timeline of three decode steps; empty if it is not drawn."""
    if not (ROOT / "docs" / "img" / "timeline.svg").is_file():
        return ""
    return "![Three decode steps as host and device see them](img/timeline.svg)"


def section(title: str, text: str, parts: list[str]) -> str:
    """A section of a page; empty without parts."""
    return "\n\n".join([f"## {title}", text, *parts]) if parts else ""


def by_case(report: dict[str, Any], show: Callable[[float], str]) -> str:
    """A table of a report's figures: a line for each case, a column for each metric."""
    metrics = list(dict.fromkeys((row["metric"], row["unit"]) for row in report["rows"]))
    values = {(row["case"], row["metric"]): show(row["value"]) for row in report["rows"]}
    cases = dict.fromkeys(row["case"] for row in report["rows"])
    rows = [(case, *(values.get((case, metric), "") for metric, _ in metrics)) for case in cases]
    return table(("", *(f"{metric}, {unit}" for metric, unit in metrics)), rows)


def label(metric: str, case: str | None, unit: str) -> str:
    """A row's name in a table. A case whose name contains the metric stands alone."""
    return f"{metric if not case else case if metric in case else f'{metric}, {case}'}, {unit}"


def where(report: dict[str, Any]) -> str:
    """The machine, versions, date and commit of a report, in a sentence."""
    return f"{report['machine']}, torch {report['versions']['torch']}, {report['date']}, commit {report['commit']}."


def number(value: float) -> str:
    """Round to three significant digits; no fraction from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
