"""`engine download`: fetch a model from the hub."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from engine.cli.json_output import only_json
from engine.core.config import is_hub_name
from engine.core.errors import ConfigError


def download(
    model: Annotated[str, typer.Argument(help="Name of the model on the hub: ORG/NAME.", show_default=False)],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit; by default main.", show_default=False)] = "",
    download_dir: Annotated[
        str,
        typer.Option(
            help="Directory of the models; by default the cache of huggingface_hub.", metavar="DIR", show_default=False
        ),
    ] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Fetch Python code too, for a command with this option.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: model, commit and directory.")] = False,
) -> None:
    """Download a model's missing files from the hub, and print its directory."""
    if not is_hub_name(model):
        raise ConfigError(f"{model} is not the name of a model on the hub; give ORG/NAME, as Qwen/Qwen3-0.6B")

    from engine.core.hub import Wanted, fetch
    from engine.core.startup_display import show_startup

    def run(*, live: bool) -> dict[str, Any]:
        with show_startup(live=live, prefix="") as listener:
            found = fetch(
                model,
                revision=revision,
                download_dir=download_dir,
                wanted=Wanted(code=trust_remote_code),
                listener=listener,
            )
        return {"model": found.model, "commit": found.commit, "directory": str(found.directory)}

    if as_json:
        with only_json() as print_json:
            print_json(run(live=False))
        return
    typer.echo(run(live=True)["directory"])
