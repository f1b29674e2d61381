"""`engine bench startup`: seconds from the start of a process to its first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import evolve, frozen

from engine.cli.bench.ceilings import Bandwidth, copy_rate
from engine.cli.bench.load import say
from engine.cli.bench.report import Json, Plot, Row, report, write
from engine.cli.opening import located
from engine.cli.options import OFFLINE, configured
from engine.cli.tables import print_table
from engine.core.config import Resolved, served_name
from engine.core.errors import ExecutorError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig

FIRST, LATER = "first start", "later start"
COMMAND = (sys.executable, "-P", "-m", "engine.cli.bench.first_token")


@frozen(kw_only=True)
class Start:
    """Times of one process, from its start to its first token."""

    phases: tuple[tuple[str, float], ...]
    """(phase, seconds), in their order."""
    weights_bytes: int
    device: str

    @property
    def seconds(self) -> float:
        """Total of all phases."""
        return sum(spent for _, spent in self.phases)


def start(config: EngineConfig) -> Start:
    """Start an engine in a fresh process. Raises ExecutorError with the output of the process if it fails."""
    from engine.core.executors import encode

    done = subprocess.run([*COMMAND, repr(time.monotonic())], input=encode(config), capture_output=True, check=False)
    if done.returncode:
        raise ExecutorError(f"the engine did not start; its process wrote:\n{done.stderr.decode().strip()}")
    reported = json.loads(done.stdout.splitlines()[-1])
    return Start(
        phases=tuple((name, seconds) for name, seconds in reported["phases"]),
        weights_bytes=reported["weights_bytes"],
        device=reported["device"],
    )


def bytecode_hint(package: str = "torch") -> str | None:
    """Why each start compiles the modules of a package, and how to avoid that; None: their bytecode is on disk."""
    spec = find_spec(package)
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    reason = f"{os.path.dirname(spec.cached)} cannot be written"
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE is set, or python was started with -B"
    command = f"python -m compileall -q {os.path.dirname(spec.origin or '')}"
    return (
        f"every start compiles the modules of {package}, and likely of other packages, since their bytecode is not on "
        f"disk and {reason}; compile them once ({command}), or unset the variable and set PYTHONPYCACHEPREFIX to a "
        "directory that is kept"
    )


@configured(without=OFFLINE)
def startup(
    *,
    repeat: Annotated[
        int, typer.Option(help="Starts, each in a fresh process; the median of all but the first counts.", min=1)
    ] = 3,
    bandwidth: Bandwidth = None,
    output: Json = None,
    plot: Plot = None,
    resolved: Resolved,
) -> None:
    """Seconds from the start of a process to its first token, by phase."""
    from engine.core.device import find_device
    from engine.core.weights import Checkpoint

    config = located(resolved).config
    Checkpoint.open(config.model.path)
    starts = []
    for number in range(repeat):
        starts.append(start(config))
        say(f"start {number + 1}: {starts[-1].seconds:.2f} s")
    median = median_of_later(starts)
    rate = bandwidth * 1e12 if bandwidth is not None else copy_rate(find_device(config.executor.device).torch_name)
    # Every start writes the weights at least once.
    share = median.weights_bytes / rate / median.seconds
    print_starts(starts, share)
    if (hint := bytecode_hint()) is not None:
        say(hint)
    settings = {
        "model": served_name(config),
        "load_format": config.model.load_format,
        "quant": config.quant.name,
        "graphs": config.executor.graphs,
        "kernels": config.executor.kernels,
        "repeat": repeat,
        "bandwidth": rate,
    }
    if output is not None:
        write(output, report("startup", median.device, rows_of(starts, share), settings))
    if plot is not None:
        from engine.cli.bench.plot import plot_startup

        plot_startup(plot, starts, median.device)


def median_of_later(starts: Sequence[Start]) -> Start:
    """The median of all starts but the first, which may have filled caches; the first if there is no other."""
    later = sorted(starts[1:] or starts, key=lambda one: one.seconds)
    return later[len(later) // 2]


def rows_of(starts: Sequence[Start], share: float) -> list[Row]:
    """Totals and phases of the median of later starts, if there are any, then of the first start.

    share: the floor's share of the first of these totals.
    """
    kinds = [(FIRST, starts[0])]
    if len(starts) > 1:
        kinds.insert(0, (LATER, median_of_later(starts)))
    totals = [Row(metric="to the first token", case=case, value=one.seconds, unit="s") for case, one in kinds]
    totals[0] = evolve(totals[0], share=share)
    phases = [(name, case, spent) for case, one in kinds for name, spent in one.phases]
    return totals + [Row(metric=name, case=case, value=spent, unit="s") for name, case, spent in phases]


def print_starts(starts: Sequence[Start], share: float) -> None:
    """Print phases in rows, starts in columns. share: the floor's share of the median of later starts."""
    names = list(dict.fromkeys(phase for one in starts for phase, _ in one.phases))
    columns = {f"start {number + 1}": one for number, one in enumerate(starts)}
    median = median_of_later(starts)
    if len(starts) > 1:
        columns["later, median"] = median
    print_table(
        ("phase", *columns),
        [
            *((name, *(f"{dict(one.phases).get(name, 0.0):.3f}" for one in columns.values())) for name in names),
            ("to the first token", *(f"{one.seconds:.3f}" for one in columns.values())),
        ],
        title=f"start-up in seconds, {median.device}; writing {median.weights_bytes / 2**20:,.0f} MiB of weights at the"
        f" device's bandwidth would take {share:.2%} of it",
    )
