"""Write the generated parts of README.md and docs/: `make docs`. With --check, only say which are out of date.

A generated part stands between the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from contract_reference import contract_reference

from engine.cli.main import Commands, app
from engine.cli.options import SETTING_SUFFIX, purpose
from engine.core.config import PluginsConfig, Setting, describe, show
from engine.core.plugin_host import load_plugins
from engine.server.metrics.definition import PREFIX, VLLM_PREFIX
from engine.server.metrics.metric_list import REPLICA_METRICS
from engine.server.metrics.server_metrics import HTTP_METRICS, PROCESS_METRICS, SERVER_METRICS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REFERENCES = ROOT / "benchmarks" / "references.json"
VERDICTS = ROOT / "scripts" / "architectures" / "verdicts.json"
FAMILIES = ROOT / "tests" / "plugins" / "models" / "families.py"
MAX_DIFFERENCE = 1e-5
"""Relative norm of a difference of float32 logits that rounding may make."""
MAX_REFUSAL = 160
"""Characters of a refusal in a table."""
METHODS = {"none": "bfloat16", "fp8": "fp8", "int8": "int8", "w4a16": "4 bits, groups of 128"}
"""As results are named -> as tables say it."""


def settings_tables() -> str:
    """Every setting of the configuration tree, one table a section."""
    sections: dict[str, list[Setting]] = {}
    for setting in describe():
        sections.setdefault(setting.path[0], []).append(setting)
    return "\n\n".join(
        f"### [{section}]\n\n{purpose(section)[0].upper()}{purpose(section)[1:]}.\n\n"
        + table(
            ("key", "type", "default", "option", "meaning"),
            (
                (
                    code(setting.path[1]),
                    " or ".join(map(code, setting.choices)) or setting.type_name,
                    code(show(setting.default)[0]),
                    code(setting.flag or ""),
                    setting.help + also(setting),
                )
                for setting in settings
            ),
        )
        for section, settings in sections.items()
    )


def also(setting: Setting) -> str:
    """The other names of a setting, as a sentence."""
    names = [*setting.aliases, *setting.alias_flags]
    return f" Also {', '.join(map(code, names))}." if names else ""


def command_reference() -> str:
    """Every command with its own arguments and options; those made from the configuration are named once."""
    flags = {setting.flag for setting in describe() if setting.flag}
    parts = []
    root = typer.main.get_command(app)
    assert isinstance(root, Commands)
    root.load_builtins()
    for path, command in commands(root, "engine"):
        # A command may have an option of its own with the name of a setting's.
        of_settings = [param for param in command.params if (param.name or "").endswith(SETTING_SUFFIX)]
        own = [param for param in command.params if param not in of_settings]
        rows = [
            (", ".join(map(code, names(param))), getattr(param, "help", "") or "")
            for param in own
            if param.name not in ("help", "install_completion", "show_completion")
        ]
        text = f"## {path}\n\n{(command.help or '').strip()}"
        if rows:
            text += "\n\n" + table(("argument or option", "meaning"), rows)
        given = {param.opts[0] for param in of_settings}
        if given:
            missing = ", ".join(map(code, sorted(flags - given)))
            text += "\n\nAnd the options of [the settings](configuration.md#settings)"
            text += f", but not {missing}." if missing else "."
        parts.append(text)
    return "\n\n".join(parts)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, command) of a command and all below it, without those that plugins add."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def names(param: Any) -> list[str]:
    """As one types an option, or an argument in capitals."""
    if param.param_type_name == "argument":
        return [param.name.upper()]
    return [*param.opts, *param.secondary_opts]


FEATURES = {
    "models": "model architectures",
    "quant": "quantization methods",
    "attention": "attention backends",
    "schedulers": "scheduling policies",
    "executors": "executors",
    "parsers": "output parsers",
    "grammars": "grammars",
    "speculators": "speculators",
}
"""Extension point -> what README calls its implementations."""
NATIVE = "native: "
"""Beginning of the summary of native models, of which README has only the names."""


def features_table() -> str:
    """What the built-in plugins offer, from their registrations."""
    registries = load_plugins(PluginsConfig(allow=("builtin",))).registries
    rows = []
    for name, title in FEATURES.items():
        native = [code(one.name) for one in registries[name] if one.summary.startswith(NATIVE)]
        lines = [f"{NATIVE}{', '.join(native)} ([table of architectures](docs/architectures.md))"] if native else []
        lines += [f"{code(one.name)}: {one.summary}" for one in registries[name] if not one.summary.startswith(NATIVE)]
        rows.append((title, "<br>".join(lines)))
    return table(("", "built in"), rows)


def architectures_table() -> str:
    """Every causal language model of transformers and who serves it, from scripts/architectures/verdicts.json."""
    stored = json.loads(VERDICTS.read_text(encoding="utf-8"))
    rows = []
    for one in sorted(stored["verdicts"].values(), key=lambda one: (one["architecture"].lower(), one["model_type"])):
        difference, notes = one["difference"], "; ".join(one["notes"])
        if one["native"]:
            served = f"native (`{one['native']}`)", ""
        elif difference is None:
            served = "refused", textwrap.shorten(one["refusal"], MAX_REFUSAL, placeholder="...")
        elif difference < MAX_DIFFERENCE:
            served = "`transformers`", notes
        else:
            served = "wrong", f"logits differ from those of transformers by {difference:.1g}"
        rows.append((one["architecture"], one["model_type"], *served))
    counts = [sum(row[2].startswith(kind) for row in rows) for kind in ("native", "`transformers", "refused", "wrong")]
    text = (
        f"All {len(rows)} causal language models of {stored['transformers']}: {counts[0]} native, {counts[1]} by the"
        f" plugin `transformers`, {counts[2]} refused" + (f", {counts[3]} wrong." if counts[3] else ".")
    )
    return f"{text}\n\n{table(('architecture', 'model_type', 'served', 'what to know'), rows)}"


def families_table() -> str:
    """Each native family, the length of its file, and how it is compared with transformers."""
    tests = runpy.run_path(str(FAMILIES))
    ranks = ", ".join(map(str, tests["RANKS"]))
    rows = []
    for model_type, family in tests["FAMILIES"].items():
        file = f"plugins/models/{family.module or family.plugin or model_type}.py"
        lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        rows.append((model_type, code(file), lines, ranks, tests["FORMS"][family.form]))
    rows.sort(key=lambda row: (-row[2], row[0]))
    return table(("model_type", "file", "lines", "ranks", "quantized form"), rows)


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
"""Metrics whose name alone says too little."""


def compared(report: dict[str, Any], references: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """A table of one report's rows that the references have too."""
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
                *(number(values[metric, case, unit, method]) for method in reports),
            )
            for metric, case, unit in dict.fromkeys(key[:3] for key in values)
            if metric in metrics and not (metric == metrics[2] and case.startswith("batch"))
        ]
        parts.append(f"### {title}\n\n{where(reports['bfloat16'])}\n\n{table(('', *reports), rows)}")
    text = "The same workloads as in [performance](performance.md), next to vLLM and SGLang."
    return section("Speed by method", text, parts)


def ablation_table() -> str:
    """What each optimisation is worth."""
    report = load_result("h200-ablation")
    if report is None:
        return ""
    text = f"{report['settings']['model']}, one setting changed at a time. {where(report)}"
    return section("What each optimisation is worth", text, [by_case(report, number)])


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
    rows = []
    for case, metrics in found.items():
        rate = next((metrics[metric] for metric in shown[:2] if metric in metrics), {})
        share, baseline = rate.get("share"), rate.get("baseline")
        cells = (number(metrics[metric]["value"]) if metric in metrics else "" for metric in shown)
        published = number(baseline) if baseline is not None else ""
        rows.append((case, *cells, published, f"{share:.0%}" if share is not None else ""))
    head = ("IN/OUT", *(LOAD_METRICS[metric] for metric in shown), "TensorRT-LLM, published", "of the serial bound")
    text = f"Output tokens per second. {where(report)} Ceilings: {report['settings']['ceilings']}."
    return section("Ten loads next to their bounds", text, [table(head, rows)])


SERVED = {1: "h200-serve-llama-3.1-8b", 2: "h200-serve-llama-3.1-8b-tp2", 4: "h200-serve-llama-3.1-8b-tp4"}
"""Results of one model served, by number of GPUs."""
SERVED_METRICS = ("output tokens a second", "TTFT p50", "TPOT p50", "CPU cores of the server")


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
    """Seconds to the first token by phase, one column a result."""
    reports = [
        (file.stem.removeprefix("h200-startup-"), json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(RESULTS.glob("h200-startup-*.json"))
    ]
    phases = list(dict.fromkeys(row["metric"] for _, report in reports for row in report["rows"]))
    spent = {(name, row["metric"]): row["value"] for name, report in reports for row in report["rows"]}
    rows = [
        (phase, *(number(spent[name, phase]) if (name, phase) in spent else "" for name, _ in reports))
        for phase in phases
    ]
    if not reports:
        return ""
    text = (
        "Seconds from the start of the process to the first token, imports included: a median start with warm caches"
        f" (kernels compiled and measured before, random weights). {where(reports[0][1])}"
    )
    return section("Start-up", text, [table(("", *(name for name, _ in reports)), rows)])


def ring_table() -> str:
    """Hops of the ring and of other transports."""
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
    """Of each way to quantize the demo model: perplexity, and what becomes of its size."""
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
    """The picture of a step, once it is drawn."""
    if not (ROOT / "docs" / "img" / "timeline.svg").is_file():
        return ""
    return "![Three decode steps as host and device see them](img/timeline.svg)"


def section(title: str, text: str, parts: list[str]) -> str:
    """A section of a page; nothing without parts."""
    return "\n\n".join([f"## {title}", text, *parts]) if parts else ""


def by_case(report: dict[str, Any], show: Callable[[float], str]) -> str:
    """A table of a report's figures: a line for each case, a column for each metric."""
    metrics = list(dict.fromkeys((row["metric"], row["unit"]) for row in report["rows"]))
    values = {(row["case"], row["metric"]): show(row["value"]) for row in report["rows"]}
    cases = dict.fromkeys(row["case"] for row in report["rows"])
    rows = [(case, *(values.get((case, metric), "") for metric, _ in metrics)) for case in cases]
    return table(("", *(f"{metric}, {unit}" for metric, unit in metrics)), rows)


def label(metric: str, case: str | None, unit: str) -> str:
    """A row's name in a table: a case that says what is measured says it alone."""
    return f"{metric if not case else case if metric in case else f'{metric}, {case}'}, {unit}"


def where(report: dict[str, Any]) -> str:
    """What a report's figures hold for, in a sentence."""
    return f"{report['machine']}, torch {report['versions']['torch']}, {report['date']}, commit {report['commit']}."


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(columns: tuple[str, ...], rows: Any) -> str:
    """A Markdown table."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def code(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"`{text}`" if text else ""


def metrics_tables() -> str:
    """Every metric of /metrics with its type, labels, help and vLLM's name."""
    found = []
    for title, metrics, common in (
        ("Of each replica", REPLICA_METRICS, "`model_name` and `replica`"),
        ("Of the server", SERVER_METRICS, "`model_name`"),
        ("Of HTTP", HTTP_METRICS, ""),
        ("Of processes", PROCESS_METRICS, "`process` (supervisor, front_end, engine, worker) and `number`"),
    ):
        rows = []
        for one in metrics:
            suffix = "_total" if one.kind == "counter" else ""
            prefix = "" if one.general else PREFIX
            rows.append(
                (
                    code(f"{prefix}{one.name}{suffix}") if one.name else "",
                    one.kind,
                    ", ".join(map(code, one.labels)),
                    one.help,
                    code(f"{VLLM_PREFIX}{one.vllm.name}{suffix}") if one.vllm else "",
                )
            )
        head = ("name", "type", "further labels", "what it is", "vLLM's name")
        labels = f"All have the labels {common}.\n\n" if common else ""
        found.append(f"### {title}\n\n{labels}{table(head, rows)}")
    return "\n\n".join(found)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/configuration.md", settings_tables),
    "commands": ("docs/cli.md", command_reference),
    "features": ("README.md", features_table),
    "transformers": ("docs/performance.md", transformers_table),
    "compared": ("docs/performance.md", compared_tables),
    "served": ("docs/performance.md", served_tables),
    "ranks": ("docs/performance.md", ranks_table),
    "startup": ("docs/performance.md", startup_table),
    "loads": ("docs/performance.md", ten_loads_table),
    "ablation": ("docs/performance.md", ablation_table),
    "perplexity": ("docs/quantization.md", perplexity_table),
    "methods": ("docs/quantization.md", methods_tables),
    "ring": ("docs/executors.md", ring_table),
    "timeline": ("docs/performance.md", timeline_figure),
    "architectures": ("docs/architectures.md", architectures_table),
    "families": ("docs/architectures.md", families_table),
    "reference": ("docs/reference.md", contract_reference),
    "metrics": ("docs/metrics.md", metrics_tables),
}


def fill(text: str, name: str, content: str) -> str:
    """`text` with the generated part `name` replaced."""
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"error: the lines that mark the generated part {name!r} are missing")
    lines = f"{content}\n" if content else ""
    return pattern.sub(lambda found: f"{found[1]}{lines}{found[2]}", text)


def outdated(root: Path = ROOT) -> dict[Path, str]:
    """The files that are not up to date, with what should be in them."""
    found = {}
    for name, (file, make) in PARTS.items():
        path = root / file
        text = found.get(path) or path.read_text(encoding="utf-8")
        wanted = fill(text, name, make())
        if wanted != text:
            found[path] = wanted
    return found


def main() -> None:
    stale = outdated()
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run `make docs`", file=sys.stderr)
        raise SystemExit(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
