"""Write the generated parts of README.md and docs/: `make docs`. With --check, only report which are out of date.

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
from markdown_text import code, table
from result_tables import (
    ablation_table,
    compared_tables,
    methods_tables,
    near_sweep_table,
    perplexity_table,
    ranks_table,
    ring_table,
    served_tables,
    shape_sweep_table,
    startup_table,
    ten_loads_table,
    timeline_figure,
    transformers_table,
)
from rich.markup import render

from engine.cli.main import Commands, app
from engine.cli.options import SETTING_SUFFIX, purpose
from engine.core.config import PluginsConfig, Setting, describe, show
from engine.core.plugin_host import load_plugins
from engine.server.metrics.definition import PREFIX, VLLM_PREFIX
from engine.server.metrics.metric_list import REPLICA_METRICS
from engine.server.metrics.server_metrics import HTTP_METRICS, PROCESS_METRICS, SERVER_METRICS

ROOT = Path(__file__).resolve().parents[1]
VERDICTS = ROOT / "scripts" / "architectures" / "verdicts.json"
FAMILIES = ROOT / "tests" / "plugins" / "models" / "families.py"
MAX_DIFFERENCE = 1e-5
"""Relative norm of a difference between float32 logits below which rounding explains the difference."""
MAX_REFUSAL = 160
"""Characters of a refusal in a table."""


def settings_tables() -> str:
    """Every setting of the configuration tree, one table per section."""
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
    """Every command with its own arguments and options, without the options made from settings."""
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
            (", ".join(map(code, names(param))), render(getattr(param, "help", "") or "").plain)
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
    """The names of an option as typed, or of an argument in capitals."""
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
    """Every causal language model of transformers and what serves it here, from scripts/architectures/verdicts.json."""
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


PARTS: dict[str, tuple[str, Callable[[], str]]] = {  # name -> (file, what makes it)
    "settings": ("docs/configuration.md", settings_tables),
    "commands": ("docs/cli.md", command_reference),
    "features": ("README.md", features_table),
    "transformers": ("docs/performance.md", transformers_table),
    "compared": ("docs/performance.md", compared_tables),
    "served": ("docs/performance.md", served_tables),
    "ranks": ("docs/performance.md", ranks_table),
    "startup": ("docs/performance.md", startup_table),
    "loads": ("docs/performance.md", ten_loads_table),
    "near-shapes": ("docs/performance.md", near_sweep_table),
    "shapes": ("docs/performance.md", shape_sweep_table),
    "ablation": ("docs/optimizations.md", ablation_table),
    "perplexity": ("docs/quantization.md", perplexity_table),
    "methods": ("docs/quantization.md", methods_tables),
    "ring": ("docs/executors.md", ring_table),
    "timeline": ("docs/benchmarks.md", timeline_figure),
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
