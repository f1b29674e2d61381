"""Kills, stops and terminates each kind of process of a server, idle and under load, and checks what is left.

    python scripts/stress/kill_schedule.py [--rounds 100] [--seed 0] [--layouts single,multiproc,tp,replicas]
        [--json FILE] [-- FLAGS OF engine serve]

A round sends one signal to one process of a server started for it (kept for the next round if it recovers):

    supervisor   SIGKILL, SIGTERM: every process ends within --end seconds; nothing is left.
    others       SIGKILL, SIGTERM, SIGSTOP: /health answers 200 and a token is computed again within --recover seconds,
                 by a new process or (SIGTERM, which front ends ignore) by the old one. The servers' time limits for
                 processes that do nothing are a few seconds, not minutes, so that a stopped one is replaced in time.
    SIGSTOP of the supervisor: after SIGCONT, all is as before.

No stream may hang for longer than --recover, no process, shared memory or directory outlive its server. Exit status 1
when a round failed. The order of the rounds follows from the seed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import Process, alive, state_of
from serving import Load, Server, wait_gone
from wire import UsageError, until, used_blocks
from written import write_report

LAYOUTS = {
    "single": ["--api-workers", "1"],
    "multiproc": ["--api-workers", "2", "--executor", "multiproc", "--executor-option", "step_timeout=5"],
    "tp": ["--api-workers", "1", "--executor", "tp", "--tp", "2", "--executor-option", "step_timeout=5"],
    "replicas": ["--api-workers", "1", "--replicas", "2"],
}
"""Name -> flags of `engine serve`."""
LIMITS = ["--set", "server.front_end_timeout=5", "--set", "server.engine_timeout=10"]
"""Flags of all layouts; an engine may wait for its workers, so its limit is the longer one."""
RESTARTS = ["--set", "server.replica_restarts=1000", "--set", "server.replica_restart_pause=0"]
"""Flags of all layouts: a schedule kills one engine more often than a server restarts it by default, and without the
pauses that then become longer than --recover."""
ROLES = {
    "single": ("supervisor", "front end", "engine"),
    "multiproc": ("supervisor", "front end 0", "engine", "worker"),
    "tp": ("supervisor", "front end", "engine", "worker 0", "worker 1"),
    "replicas": ("supervisor", "front end", "engine 0", "engine 1"),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
CLIENTS = (0, 8)


@dataclass(frozen=True)
class Round:
    """One signal to one process."""

    layout: str
    role: str
    signal: signal.Signals
    clients: int

    def __str__(self) -> str:
        return f"{self.layout:10} {self.role:12} {self.signal.name:8} {'under load' if self.clients else 'idle':10}"


@dataclass
class Outcome:
    """The result of a round."""

    round: Round
    seconds: float | None = None
    """Until the server answered again, or, after the death of the supervisor, until all had ended; None: never."""
    what: str = ""
    faults: tuple[str, ...] = ()


def schedule(
    layouts: Sequence[str],
    count: int,
    seed: int,
    roles: Sequence[str] = (),
    signals: Sequence[signal.Signals] = SIGNALS,
) -> list[Round]:
    """That many rounds, each kind equally often, ordered by layout and within a layout at random.

    roles: beginnings of the names of roles; none: all.
    """
    draw = random.Random(seed)
    kinds = [
        Round(layout, role, number, clients)
        for layout in layouts
        for role, number, clients in itertools.product(ROLES[layout], signals, CLIENTS)
        if not roles or role.startswith(tuple(roles))
    ]
    draw.shuffle(kinds)
    chosen = list(itertools.islice(itertools.cycle(kinds), count))
    return sorted(chosen, key=lambda one: layouts.index(one.layout))


class Schedule:
    """Runs rounds, and keeps a server between those that it survives."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._server: Server | None = None
        self._layout = ""
        self._started = 0

    def run(self, rounds: Sequence[Round]) -> Iterator[Outcome]:
        try:
            for number, one in enumerate(rounds):
                yield self._run(one, self._options.seed + number)
        finally:
            self._end()

    def _run(self, one: Round, seed: int) -> Outcome:
        server = self._server_of(one.layout)
        # An engine that the round before killed may still be starting, and while it is alone the other has no number.
        until(lambda: one.role in {process.role for process in server.processes()}, self._options.recover)
        victim = next((process for process in server.processes() if process.role == one.role), None)
        if victim is None:
            return Outcome(one, None, "", (f"no process has this role; there are {server.processes()}",))
        load = Load(
            server.target,
            one.clients,
            seed=seed,
            hang_up=0.1,
            lengths=(50, 100),
            patience=self._options.recover,
        )
        time.sleep(self._options.load_seconds if one.clients else 0.0)
        os.kill(victim.pid, one.signal)
        outcome = self._after_supervisor(one, server) if one.role == "supervisor" else self._after(one, server, victim)
        left = load.stop()
        counts = load.count()
        faults = [*outcome.faults]
        if not left or counts["hung"]:
            faults.append(f"{counts['hung']} streams hung for more than {self._options.recover:g} s")
        if server.process.poll() is None:
            if not outcome.faults and not until(lambda: used_blocks(server.target) == 0, 10):
                faults.append(f"{used_blocks(server.target):g} KV blocks stay used")
            if outcome.faults:
                faults += self._end()
        else:
            faults += [f"left behind: {left}" for left in server.remains(self._options.end)]
            self._server = None
        outcome.faults = tuple(faults)
        return outcome

    def _after_supervisor(self, one: Round, server: Server) -> Outcome:
        """Check the server after its supervisor was killed, terminated or stopped."""
        begin = time.monotonic()
        if one.signal is signal.SIGSTOP:
            time.sleep(1.0)
            server.process.send_signal(signal.SIGCONT)
            back = until(lambda: server.healthy() and server.answers(), self._options.recover)
            seconds = time.monotonic() - begin - 1.0 if back else None
            return Outcome(one, seconds, "went on", () if back else ("the server does not answer after SIGCONT",))
        limit = self._options.end + (35 if one.signal is signal.SIGTERM and one.clients else 0)
        members = [process.pid for process in server.processes()]
        gone = wait_gone(server.process.pid, limit)
        if gone is None:
            return Outcome(one, None, "", (f"it still runs {limit:g} s later",))
        status = server.process.wait()
        others = until(lambda: not alive(members), self._options.end)
        faults = [] if others else [f"processes {alive(members)} outlive the supervisor"]
        if one.signal is signal.SIGTERM and status != 0:
            faults.append(f"exit status {status} after SIGTERM")
        return Outcome(one, time.monotonic() - begin, f"ended, status {status}", tuple(faults))

    def _after(self, one: Round, server: Server, victim: Process) -> Outcome:
        """Check that the server answers again after a fault of one of its processes."""
        begin = time.monotonic()
        if one.signal is signal.SIGSTOP:
            until(lambda: state_of(victim.pid) == "T", 1)
        time.sleep(0.05)
        back = until(lambda: server.healthy() and server.answers(), self._options.recover)
        seconds = time.monotonic() - begin
        now = {process.pid: process.role for process in server.processes()}
        what = "the same process" if victim.pid in now else "a new process"
        if one.signal is signal.SIGSTOP and victim.pid in now and state_of(victim.pid) == "T":
            os.kill(victim.pid, signal.SIGCONT)
            what = "others served, it stayed stopped"
        if not back:
            return Outcome(one, None, "", (f"no answer within {self._options.recover:g} s{_last_words(server)}",))
        return Outcome(one, seconds, what)

    def _server_of(self, layout: str) -> Server:
        """The running server of a layout; started if there is none, or one of another layout."""
        if self._server is not None and (self._layout != layout or self._server.process.poll() is not None):
            self._end()
        if self._server is None:
            self._started += 1
            directory = self._directory / f"server{self._started}"
            directory.mkdir()
            self._server = Server([*LAYOUTS[layout], *LIMITS, *RESTARTS, *self._options.flags], directory)
            self._layout = layout
        return self._server

    def _end(self) -> list[str]:
        """End the server; returns what went wrong."""
        server, self._server = self._server, None
        if server is None:
            return []
        status = server.stop()
        faults = ["SIGTERM did not end the server"] if status is None else []
        return faults + [f"left behind: {left}" for left in server.remains(self._options.end)]


def _last_words(server: Server) -> str:
    """The last error in the server's log."""
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if re.search(r"ERROR|error:", line)]
    return f"; the log says: {lines[-1]}" if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--roles", default="", help="only processes whose role begins with one of these")
    parser.add_argument("--signals", default=",".join(one.name for one in SIGNALS))
    parser.add_argument("--recover", type=float, default=30.0, help="seconds until the server must answer again")
    parser.add_argument("--end", type=float, default=10.0, help="seconds until all processes must have ended")
    parser.add_argument("--load-seconds", type=float, default=1.0, help="seconds of load before the signal")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: flags of engine serve")
    options = parser.parse_args()
    layouts = options.layouts.split(",")
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"--layouts has {', '.join(sorted(unknown))}; there are {', '.join(LAYOUTS)}")
    try:
        signals = [signal.Signals[name] for name in options.signals.split(",")]
    except KeyError as error:
        parser.error(f"--signals has {error.args[0]}; give names as SIGKILL,SIGSTOP")
    roles = [role for role in options.roles.split(",") if role]
    rounds = schedule(layouts, options.rounds, options.seed, roles, signals)
    if not rounds:
        parser.error(f"no process has a role in --roles {options.roles}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        try:
            for outcome in Schedule(options, Path(directory)).run(rounds):
                seconds = "never" if outcome.seconds is None else f"{outcome.seconds:.2f} s"
                print(f"{outcome.round} {seconds:>8}  {outcome.what}", flush=True)
                for fault in outcome.faults:
                    print(f"    FAILED: {fault}", flush=True)
                outcomes.append(outcome)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    failed = [outcome for outcome in outcomes if outcome.faults]
    print(f"{len(outcomes)} rounds, seed {options.seed}: {len(failed)} failed")
    if options.json is not None:
        rows = [asdict(outcome) | {"round": str(outcome.round)} for outcome in outcomes]
        write_report(options.json, "kill-schedule", vars(options), {"rounds": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
