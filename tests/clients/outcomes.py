"""What was seen of which client: a pytest plugin that keeps the outcomes of tests, and the page made of them.

`pytest --outcomes FILE` adds to the file, `python outcomes.py FILE` writes docs/clients.md.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"
FEATURES = (
    *("chat", "completions", "streamed", "tools", "forced tool", "structured output", "reasoning"),
    *("responses", "messages", "usage", "errors"),
)
"""Columns of the table: the arguments of the mark `shows`."""

INTRODUCTION = """\
# Clients

Clients of other projects, as their users install them, against this server. `make clients` runs the tests of
`tests/clients`, and writes this page from what it saw. Some tests ask the demo model, whose structured outputs and
forced calls are the work of grammars; others ask a model that plays scripts, so that it reasons and calls tools.

- **chat**: /v1/chat/completions; **completions**: /v1/completions
- **responses**: /v1/responses; **messages**: /v1/messages
- **streamed**: answers come in pieces, which the client joins
- **tools**: the client reads the model's calls, and the model answers with their results
- **forced tool**: `tool_choice`, required or a named function, with arguments that match the schema
- **structured output**: the answer matches a schema (or another grammar)
- **reasoning**: the client shows the model's reasoning apart from its answer
- **usage**: the client has the numbers of tokens, the cached ones included
- **errors**: a refusal reaches the user as the client's own exception

An empty cell: the client has no such thing, or no test asks for it. A number refers to the notes below.
"""


def versions(package: str) -> str:
    """The version of an installed package; npm:NAME is one for Node.js."""
    if package.startswith("npm:"):
        from node_clients import version

        return version(package.removeprefix("npm:"))
    return metadata.version(package)


class Recorder:
    """A pytest plugin: adds the outcome of each test to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Find out which client each test is about."""
        for item in items:
            mark = item.get_closest_marker("client")
            name, package = mark.args if mark else (item.module.CLIENT, item.module.PACKAGE)
            features = {feature for one in item.iter_markers("shows") for feature in one.args}
            assert features, f"{item.nodeid} has no mark `shows`"
            assert features <= {*FEATURES}, f"{item.nodeid} shows {features - {*FEATURES}}, which is no column"
            self._tests[item.nodeid] = {
                "client": name,
                "version": versions(package),
                "features": sorted(features),
                "test": item.nodeid,
            }

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep an outcome; a skipped test leaves none."""
        test = self._tests[report.nodeid]
        expected = getattr(report, "wasxfail", None)
        if expected is not None:
            test |= {"outcome": "xfailed", "reason": expected.removeprefix("reason: ")}
        elif report.failed:
            test["outcome"] = "failed"
        elif report.when == "call" and report.passed:
            test.setdefault("outcome", "passed")

    def pytest_sessionfinish(self) -> None:
        """Add to the file."""
        seen = json.loads(self._file.read_text()) if self._file.exists() else []
        self._file.write_text(json.dumps(seen + [test for test in self._tests.values() if "outcome" in test], indent=1))


def page(tests: list[dict[str, Any]]) -> str:
    """docs/clients.md of these outcomes."""
    notes: list[str] = []
    rows = []
    clients = dict.fromkeys((test["client"], test["version"]) for test in tests)
    for client, version in clients:
        cells = [f"{client} {version}"]
        for feature in FEATURES:
            about = [test for test in tests if test["client"] == client and feature in test["features"]]
            cells.append(_cell(about, notes))
        rows.append(cells)
    lines = [INTRODUCTION, _row(["client", *FEATURES]), _row(["---"] * (len(FEATURES) + 1)), *map(_row, rows), ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)] + ([""] if notes else [])
    python = platform.python_version()
    today = datetime.datetime.now(datetime.UTC).date()
    lines.append(f"{len(tests)} tests, run on {today} with Python {python}.")
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(tests: list[dict[str, Any]], notes: list[str]) -> str:
    """What is seen of one feature: yes, no or partly, and the numbers of notes."""
    if not tests:
        return ""
    if failed := [test["test"] for test in tests if test["outcome"] == "failed"]:
        raise SystemExit(f"no page is written: these tests have failed: {', '.join(failed)}")
    reasons = list(dict.fromkeys(test["reason"] for test in tests if test["outcome"] == "xfailed"))
    notes += [reason for reason in reasons if reason not in notes]
    passed = any(test["outcome"] == "passed" for test in tests)
    word = ("partly" if passed else "no") if reasons else "yes"
    return " ".join([word, *(f"({notes.index(reason) + 1})" for reason in reasons)])


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())))
    print(f"wrote {PAGE}")
