"""guidellm: a small load test, by each route that it knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import DEMO, KEY, Server

CLIENT, PACKAGE = "guidellm", "guidellm"

OUTPUT_TOKENS = 16


@pytest.mark.parametrize(
    "route",
    [
        pytest.param("/v1/chat/completions", marks=pytest.mark.shows("chat", "streamed", "usage")),
        pytest.param("/v1/completions", marks=pytest.mark.shows("completions")),
        pytest.param("/v1/responses", marks=pytest.mark.shows("responses")),
    ],
)
def test_load(demo: Server, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={demo.url},model=demo,request_format={route},api_key={KEY}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={DEMO}", "--output", f"kind=json,path={report}"]
    offline = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=os.environ | offline, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (4, []), requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {OUTPUT_TOKENS}
