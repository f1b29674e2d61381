"""Latency and CPU time of a hop from one writer to four readers, compared with ZeroMQ and a spinning ring.

    python benchmarks/ring.py --json benchmarks/results/ring.json
    python benchmarks/ring.py --only ring "spinning Python ring" --intervals 2000 --work 60

Five processes. The writer sends a message at a fixed interval, as an engine sends steps: it sleeps, as until the
result of a step comes, announces the next message if the transport can, works (a loop, which takes the place of update
and schedule), and sends. In a tensor-parallel decode on four GPUs an engine works so for 61 to 365 microseconds, and
its steps are 2.0 to 3.4 ms apart. A reader blocks in its receive.

The hop is the time from before the send to after the receive, for each message and reader, and the cores burnt are
processor time over wall time of a reader, while messages come and while none does. The transports take turns in one
run. Each process keeps to a core of its own; where there are fewer cores, the figures are those of the scheduler.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from attrs import Factory, define, frozen

from engine.core.shm import Ring

READERS = 4
WARM_UP = 200
SLOTS = 16
CORES = sorted(os.sched_getaffinity(0))

Send = Callable[[bytes], object]
Receive = Callable[[], bytes]


class Transport(ABC):
    """One way to bring a message to all readers. The constructor runs before the fork."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def writer(self) -> Send:
        """The function that sends; called in the writer's process."""

    def announce(self) -> None:  # noqa: B027
        """Announce, in the writer's process, that a message follows soon. Most transports cannot."""

    @abstractmethod
    def reader(self, index: int) -> Receive:
        """The function that receives; called in the process of reader `index`."""


class RingTransport(Transport):
    """The engine's ring."""

    def __init__(self, size: int, implementation: str = "futex", **spin: int) -> None:
        super().__init__(size)
        self.ring = Ring.create(
            readers=READERS, slots=SLOTS, slot_bytes=max(size, 1), implementation=implementation, **spin
        )

    def writer(self) -> Send:
        writer = self.ring.writer()
        self.announce = writer.announce  # type: ignore[method-assign]
        return writer.send

    def reader(self, index: int) -> Receive:
        return self.ring.reader(index).receive


class SpinTransport(Transport):
    """A ring in Python whose readers poll the counter, and yield in between."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.memory = memoryview(mmap.mmap(-1, 4096 + SLOTS * size))
        self.counters = self.memory[: 8 * (1 + READERS)].cast("Q")

    def writer(self) -> Send:
        counters, memory, size = self.counters, self.memory, self.size

        def send(message: bytes) -> None:
            number = counters[0]
            while number - min(counters[1:]) >= SLOTS:
                os.sched_yield()
            begin = 4096 + number % SLOTS * size
            memory[begin : begin + size] = message
            counters[0] = number + 1

        return send

    def reader(self, index: int) -> Receive:
        counters, memory, size = self.counters, self.memory, self.size

        def receive() -> bytes:
            number = counters[1 + index]
            while counters[0] == number:
                os.sched_yield()
            begin = 4096 + number % SLOTS * size
            message = bytes(memory[begin : begin + size])
            counters[1 + index] = number + 1
            return message

        return receive


class ZmqTransport(Transport):
    """A ZeroMQ ipc pair for each reader."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.directory = tempfile.TemporaryDirectory()

    def _address(self, index: int) -> str:
        return f"ipc://{self.directory.name}/{index}"

    def writer(self) -> Send:
        import zmq

        context = zmq.Context.instance()
        sockets = [context.socket(zmq.PAIR) for _ in range(READERS)]
        for index, socket in enumerate(sockets):
            socket.bind(self._address(index))

        def send(message: bytes) -> None:
            for socket in sockets:
                socket.send(message)

        return send

    def reader(self, index: int) -> Receive:
        import zmq

        socket = zmq.Context.instance().socket(zmq.PAIR)
        socket.connect(self._address(index))
        return socket.recv


TRANSPORTS: dict[str, Callable[[int], Transport]] = {
    "ring": RingTransport,
    "ring, not announced": lambda size: RingTransport(size, announce_us=0),
    "ring, never spins": lambda size: RingTransport(size, announce_us=0, spin_us=0),
    "ring of pipes": lambda size: RingTransport(size, "pipe"),
    "ZeroMQ ipc pairs": ZmqTransport,
    "spinning Python ring": SpinTransport,
}


@define
class Figures:
    """The measurements of one transport and interval."""

    hops: list[int] = Factory(list)
    """ns, one for each message and reader."""
    announcements: list[int] = Factory(list)
    """ns in the writer's call."""
    sends: list[int] = Factory(list)
    """ns in the writer's call."""
    burnt: list[float] = Factory(list)
    """Cores, one entry for each reader."""
    idle: list[float] = Factory(list)


def read(receive: Receive, messages: int, out: memoryview) -> None:
    """A reader. out: hops in ns; behind them wall and processor time, in ns, of the messages and of the idle time."""
    clocks = []
    for number in range(-WARM_UP, messages):
        if number == 0:
            clocks.append((time.monotonic_ns(), time.process_time_ns()))
        stamp = int.from_bytes(receive()[:8], "little")
        if number >= 0:
            out[number] = time.monotonic_ns() - stamp
    clocks.append((time.monotonic_ns(), time.process_time_ns()))
    receive()
    clocks.append((time.monotonic_ns(), time.process_time_ns()))
    for place, (before, after) in enumerate(itertools.pairwise(clocks)):
        out[messages + 2 * place] = after[0] - before[0]
        out[messages + 2 * place + 1] = after[1] - before[1]


def keep_to_core(place: int) -> None:
    """Pin this process, the writer (0) or a reader (from 1 on), to a core as far from the others' as cores allow."""
    apart = len(CORES) // (1 + READERS)
    if apart:
        os.sched_setaffinity(0, {CORES[place * apart]})


def work(until: int) -> None:
    """Spin until time.monotonic_ns() is `until`, in place of an engine's work between two steps."""
    while time.monotonic_ns() < until:
        pass


@frozen
class Pace:
    """The pace of the writer, in microseconds."""

    interval: int
    """Between two messages, at least."""
    work: int
    """Of that, from the announcement to the send."""


def play(transport: Transport, pace: Pace, messages: int, idle: float, figures: Figures) -> None:
    """One turn of a transport."""
    outs = [memoryview(mmap.mmap(-1, 8 * (messages + 4))).cast("Q") for _ in range(READERS)]
    pids = []
    for index, out in enumerate(outs):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                keep_to_core(1 + index)
                read(transport.reader(index), messages, out)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    send = transport.writer()
    rest = bytes(transport.size - 8)
    for number in range(-WARM_UP, messages):
        time.sleep((pace.interval - pace.work) / 1e6)
        awake = time.monotonic_ns()
        transport.announce()
        announced = time.monotonic_ns()
        work(awake + 1000 * pace.work)
        begin = time.monotonic_ns()
        send(begin.to_bytes(8, "little") + rest)
        if number >= 0:
            figures.announcements.append(announced - awake)
            figures.sends.append(time.monotonic_ns() - begin)
    time.sleep(idle)
    send(bytes(transport.size))
    for pid, out in zip(pids, outs, strict=True):
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a reader failed")
        figures.hops += out[:messages].tolist()
        wall, burnt, idle_wall, idle_burnt = out[messages:].tolist()
        figures.burnt.append(burnt / wall)
        figures.idle.append(idle_burnt / idle_wall)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1000, help="of each transport, interval and turn")
    parser.add_argument("--bytes", type=int, default=1024, help="of a message")
    parser.add_argument(
        "--intervals", type=int, nargs="+", default=[300, 2000, 4000], help="microseconds between messages"
    )
    parser.add_argument("--work", type=int, default=150, help="microseconds of that, from the announcement to the send")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--idle", type=float, default=2.0, help="seconds without a message, in each turn")
    parser.add_argument(
        "--only", nargs="+", choices=TRANSPORTS, default=[*TRANSPORTS], metavar="NAME", help="; ".join(TRANSPORTS)
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not 0 <= arguments.work < min(arguments.intervals):
        parser.error("--work must be less than each of --intervals")
    keep_to_core(0)

    table: dict[tuple[str, int], Figures] = {}
    for _ in range(arguments.turns):
        for interval in arguments.intervals:
            for name in arguments.only:
                figures = table.setdefault((name, interval), Figures())
                pace = Pace(interval, arguments.work)
                play(TRANSPORTS[name](max(arguments.bytes, 8)), pace, arguments.messages, arguments.idle, figures)

    from engine.cli.bench.report import Row, report, write  # after the forks, which need not copy all that
    from engine.core.device import find_device

    rows = []
    columns = ("hop p50", "hop p99", "hop p99.9", "announce p50", "send p50", "reader, cores", "reader idle, cores")
    print(f"{'':<42}" + "".join(f"{column:>19}" for column in columns))
    for (name, interval), figures in table.items():
        hops = statistics.quantiles(figures.hops, n=1000, method="inclusive")
        values = (
            *(hops[place] / 1e3 for place in (499, 989, 998)),
            statistics.median(figures.announcements) / 1e3,
            statistics.median(figures.sends) / 1e3,
            statistics.mean(figures.burnt),
            statistics.mean(figures.idle),
        )
        case = f"{name}, every {interval} us"
        print(f"{case:<42}" + "".join(f"{value:>19.4f}" for value in values))
        rows += [
            Row(
                metric=column.removesuffix(", cores"),
                value=value,
                unit="cores" if "cores" in column else "us",
                case=case,
            )
            for column, value in zip(columns, values, strict=True)
        ]
    if arguments.json is not None:
        settings = {
            "readers": READERS,
            "bytes": arguments.bytes,
            "work_us": arguments.work,
            "messages": arguments.messages * arguments.turns,
            "idle_seconds": arguments.idle * arguments.turns,
            "cpus": len(CORES),
        }
        write(arguments.json, report("ring", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
