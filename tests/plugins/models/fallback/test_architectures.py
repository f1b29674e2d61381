"""The table of all architectures of transformers, made by scripts/architectures/run.py."""

from __future__ import annotations

import json
from pathlib import Path

from engine.plugins.models.fallback.library import causal_lms, version

ROOT = Path(__file__).resolve().parents[4]


def test_the_table_has_every_architecture_of_the_transformers_that_it_names() -> None:
    stored = json.loads((ROOT / "scripts" / "architectures" / "verdicts.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert f"causal language models of {stored['transformers']}:" in page
    if stored["transformers"] == version():  # another version may have others
        found = {name: one["architecture"] for name, one in stored["verdicts"].items()}
        assert found == causal_lms()


def test_no_architecture_is_served_with_other_logits_than_those_of_transformers() -> None:
    stored = json.loads((ROOT / "scripts" / "architectures" / "verdicts.json").read_text(encoding="utf-8"))
    differences = {name: one["difference"] for name, one in stored["verdicts"].items() if one["difference"] is not None}
    assert len(differences) > 50
    assert {name: one for name, one in differences.items() if one > 1e-5} == {}
