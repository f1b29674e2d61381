"""lm_eval with a remote tokenizer, by completions and chat completions, on tasks of its own: no data is downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import KEY, Server

CLIENT, PACKAGE = "lm_eval", "lm_eval"

QUESTIONS = [
    {"question": "Once upon a", "choices": [" time", " zebra"], "answer": 0},
    {"question": "The little girl was very", "choices": [" xylophone", " happy"], "answer": 1},
    {"question": "They lived happily ever", "choices": [" after", " purple"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICE = """
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
GENERATE = """
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A directory of two tasks, tiny_choice and tiny_generate."""
    made = tmp_path / "tasks"
    made.mkdir()
    (made / "data.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, output_type, rest in (("choice", "multiple_choice", CHOICE), ("generate", "generate_until", GENERATE)):
        text = TASK.format(name=f"tiny_{name}", data=made / "data.json", output_type=output_type, rest=rest)
        (made / f"{name}.yaml").write_text(text)
    return made


def evaluate(tasks: Path, names: str, model: str, arguments: str, *flags: str) -> tuple[dict[str, Any], list[Any]]:
    """Run `lm_eval run`; its results per task, and what the model generated."""
    home = tasks.parent
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, *flags]
    command += ["--tasks", names, "--include_path", str(tasks), "--output_path", str(home / "out"), "--log_samples"]
    offline = {"HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        command, env=os.environ | offline, cwd=home, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = home.glob("out/*/results_*.json")
    generated = [
        json.loads(line)["resps"][0][0]
        for file in home.glob("out/*/samples_tiny_generate*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return json.loads(results.read_text())["results"], generated


@pytest.mark.shows("completions")
@pytest.mark.parametrize("tokenized", [True, False], ids=["tokens", "text"])
def test_completions(demo: Server, tasks: Path, tokenized: bool) -> None:
    """Log-likelihoods of choices, and generation."""
    arguments = f"model=demo,base_url={demo.v1}/completions,tokenizer_backend=remote,num_concurrent=2"
    arguments += f",tokenized_requests={tokenized}"
    results, generated = evaluate(tasks, "tiny_choice,tiny_generate", "local-completions", arguments)
    assert results["tiny_choice"]["acc,none"] == 1
    assert len(generated) == len(QUESTIONS)
    assert all(generated)


@pytest.mark.shows("chat")
def test_chat_completions(demo: Server, tasks: Path) -> None:
    arguments = f"model=demo,base_url={demo.v1}/chat/completions,tokenizer_backend=remote"
    _, generated = evaluate(tasks, "tiny_generate", "local-chat-completions", arguments, "--apply_chat_template")
    assert len(generated) == len(QUESTIONS)
    assert all(generated)
