#!/usr/bin/env python3
"""Runs the commands of deploy/Dockerfile without Docker: each stage in a copy of a Debian root, by chroot. Needs root.

    debootstrap --variant=minbase --include=python3-dev,python3-venv,ca-certificates bookworm build/root
    scripts/run_dockerfile.py build/root --arg TORCH_INDEX=https://download.pytorch.org/whl/cpu

The root takes the place of the images that FROM names. The last stage is left in build/image; the script ends by
running the image's command there as the image's user, until the server answers /health, and stops it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\+([^}]*))?\}|(\w+))")
START_SECONDS = 600


class Stage:
    """A stage of the Dockerfile: a root, and the state that instructions change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.arguments: dict[str, str] = {}
        self.directory = "/"
        self.user = "0:0"
        self.command: list[str] = []

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the root, in the current directory and as the current user of the stage."""
        mounts = " && ".join(f"mount --rbind /{name} {shlex.quote(str(self.root / name))}" for name in ("proc", "dev"))
        inside = ["chroot", f"--userspec={self.user}", str(self.root), "env", "--chdir", self.directory, *command]
        script = f"{mounts} && exec {shlex.join(inside)}"
        return subprocess.Popen(  # what is mounted goes with the namespace
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            env=self.environment | self.arguments,
        )


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, rest of the line) of each instruction; continued lines are one."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [(name.upper(), rest.strip()) for name, _, rest in pairs]


def expanded(text: str, values: dict[str, str]) -> str:
    """`text` with the variables that Docker itself expands."""
    return VARIABLE.sub(lambda found: values.get(found[1] or found[3], ""), text)


def copy(stage: Stage, stages: dict[str, Stage], rest: str) -> None:
    """COPY: files of the checkout, but for what .dockerignore leaves out, or of another stage."""
    options = [part for part in shlex.split(rest) if part.startswith("--from=")]
    *sources, target = [part for part in shlex.split(rest) if not part.startswith("--")]
    to = stage.root / str(Path(stage.directory, target)).lstrip("/")
    for source in sources:
        if options:
            origin = stages[options[0].partition("=")[2]].root / source.lstrip("/")
            shutil.copytree(origin, to, symlinks=True, dirs_exist_ok=True)
        elif source == ".":
            for name in kept():
                origin = ROOT / name
                if origin.is_dir():
                    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
                    shutil.copytree(origin, to / name, symlinks=True, dirs_exist_ok=True, ignore=ignore)
                else:
                    shutil.copy(origin, to / name)
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, to)


def kept() -> list[str]:
    """What .dockerignore keeps."""
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def build(base: Path, given: dict[str, str], environment: dict[str, str], into: Path) -> Stage:
    """Run all instructions; the last stage, whose root is `into`."""
    stages: dict[str, Stage] = {}
    common: dict[str, str] = {}
    stage = Stage(Path())
    found = instructions(ROOT / "deploy" / "Dockerfile")
    last = max(at for at, (name, _) in enumerate(found) if name == "FROM")
    for at, (name, rest) in enumerate(found):
        print(f"==> {name} {rest}", flush=True)
        values = {**common, **stage.environment, **stage.arguments}
        if name == "FROM":
            words = rest.split()
            root = into if at == last else into.with_name(f"{into.name}-{len(stages)}")
            subprocess.run(["rm", "-rf", str(root)], check=True)
            subprocess.run(["cp", "--archive", str(base), str(root)], check=True)
            shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
            (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")  # as in the image of Python
            stage = stages[words[2] if len(words) > 2 else ""] = Stage(root)
            stage.environment |= environment
        elif name == "ARG":
            key, _, default = rest.partition("=")
            target = stage.arguments if stages else common
            target[key] = given.get(key, expanded(default, values))
        elif name == "ENV":
            for pair in shlex.split(rest):
                key, _, value = pair.partition("=")
                stage.environment[key] = expanded(value, values)
        elif name == "WORKDIR":
            stage.directory = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            stage.user = rest
        elif name == "COPY":
            copy(stage, stages, rest)
        elif name == "RUN":
            if stage.run("/bin/sh", "-c", rest).wait():
                sys.exit(f"error: this command failed: {rest}")
        elif name == "ENTRYPOINT":
            stage.command = json.loads(rest)
    return stage


def serve(stage: Stage) -> None:
    """Run the command until /health answers, then stop it by SIGTERM."""
    server = stage.run(*stage.command)
    try:
        url = f"http://127.0.0.1:{stage.command[stage.command.index('--port') + 1]}/health"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                print(url, urllib.request.urlopen(url, timeout=10).read().decode(), flush=True)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit("error: the server does not answer")
                time.sleep(0.5)
    finally:
        server.send_signal(signal.SIGTERM)
    if code := server.wait(60):
        sys.exit(f"error: the server's exit code is {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="a Debian root with Python, by debootstrap")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "image", help="the last stage's root")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="a build argument")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="set in all stages, as a proxy")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: chroot needs root")
    pairs = [dict(pair.partition("=")[::2] for pair in found) for found in (options.arg, options.env)]
    options.into.parent.mkdir(parents=True, exist_ok=True)
    stage = build(options.root, *pairs, options.into)
    serve(stage)


if __name__ == "__main__":
    main()
