"""The ring under stress: rounds of random readers, slots, sizes and delays, in which processes die at random moments.

    python benchmarks/ring_stress.py --rounds 300 --json benchmarks/results/ring-stress.json

Each round has a writer and 1 to 8 readers, processes all, and a supervisor that sees who dies and, as an executor does,
drops a dead reader or interrupts the ring. In half of the rounds the writer announces messages at random, some of them
twice, and at the end some that never come. What must arrive follows from the round's seed, so a reader checks each
message whole. A round fails if a message is lost, doubled or torn, if a process hangs, or if shared memory or
descriptors stay behind. The first failure ends the script.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.core.shm import IMPLEMENTATIONS, Ring, RingClosedError, RingHandle, RingWriter

MIB = 2**20
PATIENCE = 60.0
"""Seconds after which a process has hung."""
VICTIMS = ("nobody", "writer", "reader", "reader", "all")
"""Twice a reader: its death leads to a drop or to an interrupt."""
TORN, ENDED = 3, 0


class Failure(Exception):  # noqa: N818
    """A round has failed."""


class Round:
    """One ring and its random events, all determined by the seed."""

    def __init__(self, seed: int, implementation: str, blob: bytes, largest: int) -> None:
        self.seed = seed
        self.largest = largest
        self.blob = blob
        dice = random.Random(seed)
        self.readers = dice.randint(1, 8)
        self.slots = dice.choice((1, 2, 3, 8, 16))
        self.slot_bytes = dice.choice((64, 4096, 65536))
        self.spin_us = dice.choice((0, 20, 200))
        self.announces = seed // 100 % 2 == 0
        self.announce_us = (400, 20, 10_000)[seed // 200 % 3]
        self.spin_share = (0.09, 1.0)[seed // 600 % 2]
        self.implementation = implementation
        self.large = dice.random() < 0.15
        self.messages = dice.randint(2, 6) if self.large else dice.choice((10, 100, 1000))
        self.pause = dice.choice((0.0, 0.0, 1e-4, 2e-3))
        self.victim = dice.choice(VICTIMS)
        self.victim_reader = dice.randrange(self.readers)
        self.drops = dice.random() < 0.5
        self.kill_after = 10 ** dice.uniform(-3.5, -0.3)
        self.counts = memoryview(mmap.mmap(-1, 8 * 9)).cast("Q")
        """Shared: messages received by each reader, and behind them those sent."""

    def stream(self) -> Iterator[memoryview]:
        """The messages: mostly short ones, or a few of up to the largest."""
        dice = random.Random(self.seed + 1)
        longest = MIB if self.messages < 1000 else 99
        for _ in range(self.messages):
            most = min(self.largest, dice.choice((0, 16, 64, 65, 5000, 70_000, longest)))
            size = dice.randint(0, most)
            if self.large:
                size = self.largest if dice.random() < 0.3 else dice.randint(0, self.largest)
            begin = dice.randrange(len(self.blob) - size)
            yield memoryview(self.blob)[begin : begin + size]

    def dawdle(self, dice: random.Random) -> None:
        if self.pause and dice.random() < 0.3:
            time.sleep(dice.random() * self.pause)

    def announce(self, writer: RingWriter, dice: random.Random) -> None:
        while self.announces and dice.random() < 0.5:
            writer.announce()
            self.dawdle(dice)

    def write(self, handle: RingHandle) -> int:
        dice = random.Random(self.seed + 2)
        writer = Ring.attach(handle).writer()
        try:
            for message in self.stream():
                self.announce(writer, dice)
                writer.send(message)
                self.counts[8] += 1
                self.dawdle(dice)
        except RingClosedError:
            return ENDED
        self.announce(writer, dice)
        writer.close()
        return ENDED

    def read(self, handle: RingHandle, index: int) -> int:
        dice = random.Random(self.seed + 3 + index)
        reader = Ring.attach(handle).reader(index)
        stream = self.stream()
        while True:
            try:
                message = reader.receive()
            except RingClosedError:
                return ENDED
            if message != next(stream, None):
                return TORN
            self.counts[index] += 1
            self.dawdle(dice)

    def play(self) -> str:
        """Run the round; returns who was to be killed, and whether anyone was. Raises Failure."""
        ring = Ring.create(
            readers=self.readers,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            spin_us=self.spin_us,
            announce_us=self.announce_us,
            spin_share=self.spin_share,
            implementation=self.implementation,
        )
        pids = [fork(lambda index=index: self.read(ring.handle, index)) for index in range(self.readers)]
        pids.append(fork(lambda: self.write(ring.handle)))
        victims = {"nobody": [], "writer": [self.readers], "reader": [self.victim_reader], "all": [*range(len(pids))]}
        begin = time.monotonic()
        alive = dict(zip(pids, [*range(self.readers), self.readers], strict=True))
        died: set[int] = set()
        killed = self.victim == "nobody"
        while alive:
            if not killed and time.monotonic() - begin >= self.kill_after:
                killed = True
                for part in victims[self.victim]:
                    if pids[part] in alive:
                        os.kill(pids[part], signal.SIGKILL)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() - begin > PATIENCE:
                    for left in alive:
                        os.kill(left, signal.SIGKILL)
                        os.waitpid(left, 0)
                    raise Failure(f"parts {sorted(alive.values())} hang (part {self.readers} is the writer)")
                time.sleep(2e-4)
                continue
            part = alive.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                died.add(part)
                if part < self.readers and self.drops and self.victim != "all":
                    ring.drop(part)
                else:
                    ring.interrupt(f"part {part} is dead")
            elif code:
                raise Failure(
                    f"part {part} " + ("received what was not sent" if code == TORN else f"ended with {code}")
                )
        self.check(died)
        return f"{self.victim} {'killed' if died else 'in peace'}" if self.victim != "nobody" else "nobody killed"

    def check(self, died: set[int]) -> None:
        """Every live process has received all messages, except one that was being sent when a process died."""
        sent = self.counts[8]
        received = [self.counts[index] for index in range(self.readers) if index not in died]
        if not died and sent != self.messages:
            raise Failure(f"only {sent} of {self.messages} were sent")
        writer_died = self.readers in died
        interrupted = bool(died) and not writer_died and not self.drops
        if any(not sent - interrupted <= count <= sent + writer_died for count in received):
            raise Failure(f"{sent} of {self.messages} were sent, and received were {received}")
        if self.implementation == "futex" and not interrupted and len(set(received)) > 1:
            raise Failure(f"the readers received {received}, and should have received the same")
        if self.victim == "reader" and self.drops and received and sent != self.messages:
            raise Failure(f"the writer stopped after {sent} of {self.messages}, for a reader that was dropped")


def fork(part: Callable[[], int]) -> int:
    """A process that ends with what `part` returns."""
    pid = os.fork()
    if pid == 0:
        code = 4
        try:
            code = part()
        finally:
            os._exit(code)
    return pid


def names() -> set[str]:
    """Names of the rings in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("ring-*")}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    """Run the rounds, and print or write what happened in them."""
    known = [one.implementation for one in IMPLEMENTATIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="of each implementation")
    parser.add_argument("--implementation", choices=known, action="append", help="more than once for several; all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=64 * MIB, help="bytes of the longest message")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    blob = random.Random(0).randbytes(arguments.largest + 2 * MIB)
    results: list[tuple[str, str, int]] = []
    files = open_files()
    for implementation in arguments.implementation or known:
        done: Counter[str] = Counter()
        for number in range(arguments.rounds):
            seed = arguments.seed + 100 * number
            game = Round(seed, implementation, blob, arguments.largest)
            try:
                done[game.play()] += 1
            except Failure as failure:
                sys.exit(f"{implementation}, seed {seed}: {failure}")
            done["messages received and checked"] += sum(game.counts[:8])
            if names() or open_files() > files:
                sys.exit(f"{implementation}, seed {seed}: left behind: {names()}, {open_files() - files} descriptors")
        results += [(implementation, what, count) for what, count in sorted(done.items())]
    for implementation, what, count in results:
        print(f"{implementation:<8}{what:<40}{count:>10}")
    print("no round failed")
    if arguments.json is not None:
        write_json(arguments, results)


def write_json(arguments: argparse.Namespace, results: list[tuple[str, str, int]]) -> None:
    from engine.cli.bench.report import Row, report, write  # not before the forks: they need not copy all that
    from engine.core.device import find_device

    rows = [
        Row(metric=what, value=count, unit="messages" if "messages" in what else "rounds", case=implementation)
        for implementation, what, count in results
    ]
    rows.append(Row(metric="rounds that failed", value=0, unit="rounds"))
    settings = {
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "readers": "1 to 8",
        "largest_message": arguments.largest,
    }
    write(arguments.json, report("ring stress", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
