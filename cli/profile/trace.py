"""`engine profile trace`: what every process does and when, as one Chrome trace, of a server or of an offline load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.errors import ServerError
from engine.cli.http_client import HttpClient
from engine.cli.options import ADMIN_KEY_VARIABLE, OFFLINE, configured, refuse_settings
from engine.cli.output_file import check_file
from engine.cli.profile.target import AdminKey
from engine.core.config import Resolved

if TYPE_CHECKING:
    from engine.core.timeline import Report


@configured(without=OFFLINE)
def trace(
    *,
    url: Annotated[str, typer.Option(help="A running server; without it, an offline load is recorded.")] = "",
    admin_api_key: AdminKey = "",
    replica: Annotated[int, typer.Option(help="With --url: the replica to record.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Steps to record.", min=1)] = 20,
    after: Annotated[int, typer.Option(help="Steps to wait before the first one recorded.", min=0)] = 8,
    batch: Annotated[int, typer.Option(help="Without --url: concurrent requests of the load.", min=1)] = 8,
    input_len: Annotated[int, typer.Option(help="Without --url: prompt tokens per request.", min=1)] = 128,
    output: Annotated[Path, typer.Option(help="Without --url: file of the trace.")] = Path("profile.trace.json.gz"),
    kernels_only: Annotated[bool, typer.Option("--kernels-only", help="Leave out PyTorch's operators.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark steps and phases with NVTX ranges too.")] = False,
    resolved: Resolved,
) -> None:
    """Record some steps of all processes into one trace for Perfetto or chrome://tracing."""
    activities = ["cuda"] if kernels_only else ["cpu", "cuda"]
    if url:
        refuse_settings(resolved)
        asked = {"steps": steps, "after": after, "activities": activities, "nvtx": nvtx, "replica": replica}
        key = admin_key(admin_api_key)
        post(url, key, "/start_profile", asked)
        _say(post(url, key, "/stop_profile", {"wait": True, "replica": replica}))
        return
    check_file("--output", output)
    from engine.core.timeline import TraceOptions

    options = TraceOptions(
        path=str(output), steps=steps, after=after, activities=tuple(activities), nvtx=nvtx, max_steps=max(steps, 1)
    )
    _say(_plain(record_offline(resolved, options, batch, input_len)))


def record_offline(resolved: Resolved, options: Any, batch: int, input_len: int) -> Report:
    """Record a load of `batch` requests that decode long enough."""
    from engine.cli.bench.load import Load
    from engine.core import Engine

    with Engine(config=resolved.config) as engine:
        budget = engine.config.scheduler.max_batch_tokens
        prefills = -(-batch * input_len // max(budget - batch, 1))
        load = Load(name="", lengths=((input_len, options.steps + options.after + prefills + 2),) * batch)
        for request in load.requests(engine.vocab_size, "profile-"):
            engine.add(request)
        engine.start_trace(options)
        while engine.has_work:
            engine.step()
        engine.stop_trace()
        report = engine.trace_report(wait=True)
        assert report is not None
        return report


def _plain(report: Report) -> dict[str, Any]:
    import msgspec

    made: dict[str, Any] = msgspec.to_builtins(report)
    return made


def admin_key(given: str) -> str:
    """The admin key: that of an option, or the first of the environment variable."""
    return given or os.environ.get(ADMIN_KEY_VARIABLE, "").partition(",")[0].strip()


def post(url: str, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the replica that `body` names. Raises InvalidRequestError and ServerError."""
    client = HttpClient(url.rstrip("/").removesuffix("/v1"), key, "--admin-api-key", (ADMIN_KEY_VARIABLE,))
    match client.json(path, body):
        case {"replicas": [dict(answer)]}:
            return answer
    raise ServerError(f"the answer to {path} is not that of `engine serve`; check --url")


def _say(report: dict[str, Any]) -> None:
    """Print what was recorded."""
    typer.echo(
        f"{report['steps']} steps of {len(report['processes'])} processes ({', '.join(report['processes'])}): "
        f"{report['events']} events, clocks agree within {report['clock_error_us']:.1f} us"
    )
    for sentence in report["cut"]:
        typer.echo(f"left out: {sentence}")
    typer.echo(f"{report['path']} ({report['bytes'] / 2**20:.1f} MiB); open it at https://ui.perfetto.dev")
