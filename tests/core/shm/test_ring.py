from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from engine.core.executors.wire import MessageDecoder, encode
from engine.core.shm import (
    Ring,
    RingClosedError,
    RingError,
    RingHandle,
    RingReader,
    RingSpaceError,
    RingTimeoutError,
    futex as futex_module,
)
from engine.core.shm.futex import FutexSignals
from engine.core.shm.ring import IMPLEMENTATIONS, choose
from engine.core.shm.segment import free_bytes

LONG = 20.0
"""Seconds after which a test has hung."""
SHM = Path("/dev/shm")


@pytest.fixture(params=[one.implementation for one in IMPLEMENTATIONS])
def implementation(request: pytest.FixtureRequest) -> str:
    [kind] = [one for one in IMPLEMENTATIONS if one.implementation == request.param]
    refused = kind.refuses()
    if refused is not None:
        pytest.skip(refused)
    return str(request.param)


@pytest.fixture
def make(implementation: str) -> Iterator[Callable[..., Ring]]:
    """Rings of one reader, 4 slots and 64 bytes, unless said otherwise."""
    made: list[Ring] = []

    def create(**settings: Any) -> Ring:
        settings = {"readers": 1, "slots": 4, "slot_bytes": 64, "implementation": implementation, **settings}
        made.append(Ring.create(**settings))
        return made[-1]

    yield create
    for ring in made:
        ring.close()


def in_thread(function: Callable[[], object]) -> Callable[[], Any]:
    """Begin a call in a thread; what is returned waits for it and gives its value, or the error it raised."""
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(function())
        except RingError as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()

    def value() -> object:
        thread.join(LONG)
        assert outcome, "the call has hung"
        return outcome[0]

    return value


def drain(reader: RingReader) -> list[bytes]:
    received = []
    while True:
        try:
            received.append(reader.receive(LONG))
        except RingClosedError:
            return received


def start(code: str, ring: Ring, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs `code` with `ring`, attached, and `arguments`, as strings."""
    prelude = (
        "import os, signal, sys, time\nfrom engine.core.shm import *\n"
        "from engine.core.executors.wire import MessageDecoder\n"
        "ring = Ring.attach(MessageDecoder(RingHandle).decode(bytes.fromhex(sys.argv[1])))\narguments = sys.argv[2:]\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, encode(ring.handle).hex(), *map(str, arguments)],
        pass_fds=ring.handle.descriptors,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=LONG)[0].strip()


def test_every_reader_receives_every_message_in_order(make: Callable[..., Ring]) -> None:
    ring = make(readers=3)
    writer, readers = ring.writer(), [ring.reader(index) for index in range(3)]
    received = [in_thread(lambda reader=reader: drain(reader)) for reader in readers]
    sent = [bytes([number % 251]) * (number * 7 % 200) for number in range(500)]  # some longer than a slot
    for message in sent:
        writer.send(message, LONG)
    writer.close()
    assert [value() for value in received] == [sent] * 3


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 5000, 3 * 2**20])
def test_a_message_of_any_size_arrives(make: Callable[..., Ring], size: int) -> None:
    ring = make()
    writer, reader = ring.writer(), ring.reader(0)
    message = os.urandom(size)
    for form in (message, bytearray(message), memoryview(message)):
        writer.send(form, LONG)
        assert reader.receive(LONG) == message


def test_messages_wait_for_a_reader_that_comes_later(make: Callable[..., Ring]) -> None:
    ring = make()
    writer = ring.writer()
    writer.send(b"first")
    writer.send(bytes(1000))
    reader = ring.reader(0)
    assert [reader.receive(LONG), reader.receive(LONG)] == [b"first", bytes(1000)]


def test_a_full_ring_makes_the_writer_wait_for_the_slowest(make: Callable[..., Ring]) -> None:
    ring = make(readers=2)
    writer, fast, slow = ring.writer(), ring.reader(0), ring.reader(1)
    for number in range(4):
        writer.send(bytes([number]))
        fast.receive(LONG)
    with pytest.raises(RingTimeoutError):
        writer.send(b"5", timeout=0.02)
    sending = in_thread(lambda: writer.send(b"5", LONG))
    assert slow.receive(LONG) == b"\0"
    assert sending() is None
    assert fast.receive(LONG) == b"5"


def test_an_empty_ring_makes_a_reader_wait(make: Callable[..., Ring]) -> None:
    ring = make()
    reader = ring.reader(0)
    begin = time.monotonic()
    with pytest.raises(RingTimeoutError, match=r"0\.05 s"):
        reader.receive(0.05)
    assert 0.05 <= time.monotonic() - begin < LONG
    with pytest.raises(RingTimeoutError):
        reader.receive(0)


def test_ready_tells_whether_receive_returns_at_once(make: Callable[..., Ring]) -> None:
    ring = make()
    writer, reader = ring.writer(), ring.reader(0)
    assert not reader.ready()
    writer.send(b"")
    assert reader.ready()
    assert reader.receive(0) == b""
    assert not reader.ready()
    writer.close()
    assert reader.ready()


@pytest.mark.parametrize("spin", [{}, {"announce_us": 0}, {"spin_share": 0.0}, {"announce_us": 10**6}], ids=str)
def test_an_announcement_changes_nothing_that_is_received(make: Callable[..., Ring], spin: Any) -> None:
    ring = make(readers=2, **spin)
    writer, readers = ring.writer(), [ring.reader(0), ring.reader(1)]
    writer.announce()
    assert not readers[0].ready()
    with pytest.raises(RingTimeoutError):
        readers[0].receive(0.01)
    received = [in_thread(lambda reader=reader: drain(reader)) for reader in readers]
    for number in range(100):
        for _ in range(number % 3):
            writer.announce()
        writer.send(bytes([number]), LONG)
    writer.announce()
    writer.close()
    assert [value() for value in received] == [[bytes([number]) for number in range(100)]] * 2


def test_announcements_never_block_or_raise(make: Callable[..., Ring]) -> None:
    ring = make(slots=1)
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"the only slot")
    writer.announce()
    ring.interrupt("over")
    writer.announce()
    assert drain(reader) == [b"the only slot"]
    reader.close()
    writer.announce()


def test_readers_receive_what_was_sent_before_the_writer_closed(make: Callable[..., Ring]) -> None:
    ring = make()
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"last")
    assert ring.closed is None
    writer.close()
    assert reader.receive(LONG) == b"last"
    with pytest.raises(RingClosedError, match="its writer has closed it"):
        reader.receive(LONG)
    with pytest.raises(RingClosedError):
        writer.send(b"")
    assert ring.closed == "its writer has closed it"


def test_an_interrupt_ends_every_wait_with_the_first_reason(make: Callable[..., Ring]) -> None:
    ring = make(readers=2)
    writer, reader, idle = ring.writer(), ring.reader(0), ring.reader(1)
    waiting = in_thread(reader.receive)
    time.sleep(0.05)
    ring.interrupt("worker 1 is dead: killed by signal 9")
    ring.interrupt("a later reason")
    assert str(waiting()) == "worker 1 is dead: killed by signal 9"
    for call in (lambda: writer.send(b""), idle.receive):
        with pytest.raises(RingClosedError, match="worker 1 is dead"):
            call()


def test_an_interrupt_ends_the_wait_of_a_writer(make: Callable[..., Ring]) -> None:
    ring = make(slots=1)
    writer = ring.writer()
    writer.send(b"")
    waiting = in_thread(lambda: writer.send(b""))
    time.sleep(0.05)
    ring.interrupt("enough " * 1000)
    assert isinstance(waiting(), RingClosedError)
    assert str(waiting()).startswith("enough enough")


def test_what_was_sent_before_an_interrupt_is_received(make: Callable[..., Ring]) -> None:
    ring = make()
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"one")
    ring.interrupt("over")
    assert drain(reader) == [b"one"]


def test_a_dropped_reader_is_waited_for_no_longer(make: Callable[..., Ring]) -> None:
    ring = make(readers=2, slots=1)
    writer, reader, dropped = ring.writer(), ring.reader(0), ring.reader(1)
    writer.send(b"1")
    assert reader.receive(LONG) == b"1"
    sending = in_thread(lambda: writer.send(b"2", LONG))
    time.sleep(0.05)
    ring.drop(1)
    ring.drop(1)
    assert sending() is None
    assert reader.receive(LONG) == b"2"
    with pytest.raises(RingClosedError, match="reader 1 has left or was dropped"):
        dropped.receive(LONG)


def test_a_dropped_reader_that_waits_is_woken(make: Callable[..., Ring]) -> None:
    ring = make()
    reader = ring.reader(0)
    waiting = in_thread(reader.receive)
    time.sleep(0.05)
    ring.drop(0)
    assert isinstance(waiting(), RingClosedError)


def test_send_raises_when_no_reader_is_left(make: Callable[..., Ring]) -> None:
    ring = make(readers=2)
    writer = ring.writer()
    for index in range(2):
        ring.reader(index).close()
    with pytest.raises(RingClosedError, match="no reader is left"):
        writer.send(b"")
    assert ring.closed is None


def test_long_messages_take_memory_until_all_readers_have_them(make: Callable[..., Ring]) -> None:
    ring = make(readers=2)
    writer, readers = ring.writer(), [ring.reader(0), ring.reader(1)]
    file = ring.handle.descriptors[0]
    base = os.fstat(file).st_size
    for _ in range(8):  # a later one takes the place of those received
        for size in (10_000, 70_000, 200):
            writer.send(os.urandom(size), LONG)
        for reader in readers:
            assert [len(reader.receive(LONG)) for _ in range(3)] == [10_000, 70_000, 200]
        assert os.fstat(file).st_size <= base + 12_288 + 73_728 + 4096
    writer.send(b"short")
    assert os.fstat(file).st_size == base


def test_the_memory_has_no_name_and_is_only_ours(make: Callable[..., Ring]) -> None:
    before = set(SHM.iterdir()) if SHM.is_dir() else set()
    ring = make()
    ring.writer().send(bytes(10_000))
    status = os.fstat(ring.handle.descriptors[0])
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    assert set(SHM.iterdir() if SHM.is_dir() else ()) <= before
    assert not any(os.get_inheritable(descriptor) for descriptor in ring.handle.descriptors)


def test_a_file_system_without_nameless_files_has_the_name_for_a_moment_only(
    make: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    opened = []
    monkeypatch.setattr(os, "open", lambda *arguments, to=os.open: opened.append(arguments) or to(*arguments))
    ring = make(directory=tmp_path)
    [(path, flags, mode)] = opened
    assert re.fullmatch(r"ring-[0-9a-f]{32}", path.name)
    assert flags & os.O_EXCL
    assert mode == 0o600
    assert os.fstat(ring.handle.descriptors[0]).st_nlink == 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named(make: Callable[..., Ring], tmp_path: Path) -> None:
    with pytest.raises(RingError, match="missing takes no shared memory"):
        make(directory=tmp_path / "missing")


def _open_files() -> set[int]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc")
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def test_closing_gives_memory_and_descriptors_back(make: Callable[..., Ring], implementation: str) -> None:
    gc.collect()  # rings of earlier tests, which would otherwise be closed during this one
    before = _open_files()
    with Ring.create(readers=1, implementation=implementation) as ring:
        reader, writer = ring.reader(0), ring.writer()
        writer.send(b"x")
        assert reader.receive() == b"x"
        assert len(_open_files()) > len(before)
    ring.close()
    del ring, reader, writer
    assert _open_files() <= before


def test_too_few_descriptors_are_a_sentence_and_none_is_lost(make: Callable[..., Ring]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # rings of earlier tests, which would otherwise be closed during this one
    before = _open_files()
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(RingError, match="Too many open files"):
            make(readers=8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _open_files() <= before


def test_too_little_shared_memory_is_said_before_anything_is_made(make: Callable[..., Ring]) -> None:
    if not SHM.is_dir():
        pytest.skip("there is no /dev/shm")
    slot_bytes = min(2**30, free_bytes(SHM) // 64)
    slots = free_bytes(SHM) // slot_bytes + 2
    with pytest.raises(RingSpaceError, match=r"/dev/shm has [\d.]+ MiB free; make it larger"):
        make(slots=slots, slot_bytes=slot_bytes)


def test_a_message_that_does_not_fit_leaves_the_ring_as_it_was(make: Callable[..., Ring]) -> None:
    ring = make()
    writer, reader = ring.writer(), ring.reader(0)
    file = ring.handle.descriptors[0]
    size = os.fstat(file).st_size
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, hard))  # as a full file system answers, after a part
    try:
        with pytest.raises(RingSpaceError, match=r"a message longer than a slot needs 0\.1 MiB"):
            writer.send(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert os.fstat(file).st_size == size
    writer.send(b"after it")
    assert reader.receive(LONG) == b"after it"


@pytest.mark.parametrize(
    "wrong",
    [
        {"readers": 0},
        {"readers": 65},
        {"slots": 0},
        {"slot_bytes": 0},
        {"spin_us": -1},
        {"announce_us": 10**6 + 1},
        {"spin_share": 1.1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_impossible_rings_are_refused(make: Callable[..., Ring], wrong: Any) -> None:
    with pytest.raises(RingError, match=rf"{next(iter(wrong))} must be in \["):
        make(**wrong)


def test_an_index_that_is_not_there_is_refused(make: Callable[..., Ring]) -> None:
    with pytest.raises(RingError, match="there is no reader 1"):
        make().reader(1)


def test_a_wrong_descriptor_is_noticed_and_left_open(make: Callable[..., Ring]) -> None:
    ring = make()
    with Path(__file__).open("rb") as other:
        wrong = evolve(ring.handle, descriptors=(other.fileno(), *ring.handle.descriptors[1:]))
        with pytest.raises(RingError, match="is not that of the ring"):
            Ring.attach(wrong)
        assert other.read(4) == b"from"


def test_auto_takes_what_works_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ring.create(readers=1).implementation == choose().implementation
    monkeypatch.setattr(futex_module, "native_part", lambda: None)
    with Ring.create(readers=1) as ring:
        assert ring.implementation == "pipe"
    with pytest.raises(RingError, match=r"no ring of 'futex' here: .*(not built|Linux)"):
        Ring.create(readers=1, implementation="futex")
    with pytest.raises(RingError, match="use auto, futex or pipe"):
        Ring.create(readers=1, implementation="smoke")


def test_the_native_part_is_built_where_there_is_a_compiler() -> None:
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        pytest.skip("the native part needs Linux and a C compiler")
    assert FutexSignals.refuses() is None


def test_the_handle_is_plain_data(make: Callable[..., Ring]) -> None:
    handle = make(readers=3).handle
    assert MessageDecoder(RingHandle).decode(encode(handle)) == handle


def test_writers_and_readers_in_other_processes_exchange_all_messages(make: Callable[..., Ring]) -> None:
    there, back = make(readers=2), make(readers=1)
    echo = "reader, total = ring.reader(int(arguments[0])), 0\n"
    echo += "while True:\n    try: total += sum(reader.receive(20))\n    except RingClosedError: print(total); break"
    children = [start(echo, there, index) for index in range(2)]
    source = "w = ring.writer()\nfor n in range(300): w.send(bytes([n % 256]) * (n % 100), 20)\nw.close()"
    sender = start(source, back)
    reader, writer = back.reader(0), there.writer()
    received = 0
    for message in drain(reader):
        received += sum(message)
        writer.send(message, LONG)
    writer.close()
    assert {finish(child) for child in children} == {str(received)}
    assert received == sum(number % 256 * (number % 100) for number in range(300))
    finish(sender)


def test_a_dead_reader_is_dropped_and_the_writer_goes_on(make: Callable[..., Ring]) -> None:
    ring = make(readers=2, slots=2)
    child = start("r = ring.reader(1); r.receive(); print('one', flush=True); time.sleep(60)", ring)
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"1")
    assert line(child) == "one"
    received = in_thread(lambda: drain(reader))
    writer.send(b"2")
    writer.send(b"3")
    child.kill()
    child.communicate()
    sending = in_thread(lambda: [writer.send(b"x", LONG) for _ in range(10)])
    time.sleep(0.02)
    ring.drop(1)
    assert sending() == [None] * 10
    writer.close()
    assert received() == [b"1", b"2", b"3", *[b"x"] * 10]


def test_a_dead_writer_is_reported_after_what_it_sent(make: Callable[..., Ring]) -> None:
    ring = make()
    child = start("w = ring.writer(); w.send(b'1'); w.send(bytes(9999)); os.kill(os.getpid(), signal.SIGKILL)", ring)
    reader = ring.reader(0)
    received = in_thread(lambda: drain(reader))
    child.communicate(timeout=LONG)
    ring.interrupt("the writer is dead")
    assert received() == [b"1", bytes(9999)]
    assert ring.closed == "the writer is dead"


def test_another_process_can_interrupt(make: Callable[..., Ring]) -> None:
    ring = make()
    reader = ring.reader(0)
    waiting = in_thread(reader.receive)
    finish(start("ring.interrupt('from elsewhere')", ring))
    assert str(waiting()) == "from elsewhere"


def test_a_signal_is_handled_in_a_wait(make: Callable[..., Ring]) -> None:
    child = start(
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nr = ring.reader(0)\n"
        "try:\n    print('waits', flush=True)\n    r.receive()\nexcept KeyboardInterrupt: print('interrupted')",
        make(),
    )
    assert line(child) == "waits"
    time.sleep(0.05)
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert finish(child) == "interrupted"
    assert time.monotonic() - begin < LONG


def test_a_reader_that_waits_takes_no_processor_time(make: Callable[..., Ring]) -> None:
    ring = make(spin_us=100)
    reader = ring.reader(0)
    with pytest.raises(RingTimeoutError):
        reader.receive(0.3)  # it gives up spinning
    begin = time.process_time()
    with pytest.raises(RingTimeoutError):
        reader.receive(1.0)
    assert time.process_time() - begin < 0.1


def test_announcements_without_end_do_not_keep_a_reader_busy(make: Callable[..., Ring]) -> None:
    ring = make()
    child = start(
        "r = ring.reader(0)\nprint('waits', flush=True)\nbegin = time.process_time()\n"
        "try: r.receive(1.0)\nexcept RingTimeoutError: print(time.process_time() - begin)",
        ring,
    )
    writer = ring.writer()
    assert line(child) == "waits"
    while child.poll() is None:
        writer.announce()
        time.sleep(2e-4)
    assert float(finish(child)) < 0.6  # mostly of waking
