"""The executor and its processes, around a runner without a model: what comes back, and what faults leave behind."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CapacityError, ControlError, EngineError, ExecutorError, PluginError
from engine.core.shm import RingSpaceError, RingWriter, overflow, segment
from engine.core.startup import Progress
from engine.core.types import NewSequence, SamplingParams, Step
from engine.plugins.executors import workers
from engine.plugins.executors.multiproc import MultiprocExecutor, Options
from engine.plugins.executors.tp import TensorParallelExecutor
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.plugins.executors.workers import STOP_SECONDS

Make = Callable[..., Any]
MakeStep = Callable[[int], Step]
Pids = Callable[[], list[int]]
PROMPT = 10.0
"""Seconds; anything that is noticed rather than waited for takes far less, on a busy machine too."""


def run(executor: Any, *steps: Step) -> list[int]:
    return [executor.submit(step).result().tokens[0][0] for step in steps]


@pytest.mark.parametrize("ranks", [1, 2])
def test_executor_returns_results_in_order_of_steps(make_executor: Make, make_step: MakeStep, ranks: int) -> None:
    executor = make_executor(ranks)
    info = executor.start()
    assert info.num_blocks == 101 - ranks  # what the smallest has
    assert info.device == "rank 0"
    assert executor.asynchronous
    first = executor.submit(make_step(1))
    second = executor.submit(make_step(2))
    with pytest.raises(ExecutorError, match="step 3 was submitted while 2 others"):
        executor.submit(make_step(3))
    assert second.result().tokens == ((2,),)
    assert first.done()
    assert first.result().tokens == ((1,),)
    assert run(executor, *map(make_step, range(3, 50))) == list(range(3, 50))


def test_executor_returns_a_result_while_the_next_step_runs(
    make_executor: Make, make_step: MakeStep, until: Make, tmp_path: Path
) -> None:
    executor = make_executor(hold=str(tmp_path))
    executor.start()
    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    until(lambda: executor._heartbeats[0].begun == 2)
    assert not first.done()
    (tmp_path / "1").touch()
    first.result()
    assert not second.done()
    (tmp_path / "2").touch()
    second.result()


def test_executor_announces_the_step_after_a_result(
    make_executor: Make, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str, call: Make) -> Make:
        return lambda *given: (calls.append(name), call(*given))

    for name in ("announce", "send"):
        monkeypatch.setattr(RingWriter, name, noted(name, getattr(RingWriter, name)))
    executor = make_executor()
    executor.start()
    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    first.result()
    assert calls == ["send", "send", "announce"]
    second.result()
    run(executor, make_step(3))
    assert calls == ["send", "send", "announce", "announce", "send", "announce"]


def test_every_rank_runs_every_step(make_executor: Make, make_step: MakeStep, until: Make) -> None:
    executor = make_executor(3)
    executor.start()
    run(executor, *map(make_step, (1, 2, 3)))
    until(lambda: [row.finished for row in executor._heartbeats] == [3, 3, 3])


def test_executor_sends_a_long_prompt(make_executor: Make) -> None:
    executor = make_executor(2)
    executor.start()
    prompt = tuple(range(300_000))
    new = NewSequence(sequence=1, tokens=prompt, prompt_len=len(prompt), params=SamplingParams(seed=0))
    assert run(executor, Step(id=1, decodes=(), chunks=(), new=(new,))) == [1]


def test_start_reports_progress_by_rank(make_executor: Make) -> None:
    for ranks, named in ((1, {None}), (2, {0, 1})):
        reports: list[Progress] = []
        executor = make_executor(ranks)
        executor.watch(reports.append)
        assert [phase for phase, _ in executor.start().phases] == ["weights"]
        assert {one.rank for one in reports} == named
        assert {one.phase for one in reports} == {"weights"}


def test_start_raises_a_worker_error_with_its_class(make_executor: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make_executor(2, **{"1": {"at": "start", "do": "capacity"}})
    with pytest.raises(CapacityError, match=r"^the worker of rank 1 \(process \d+\) failed in weights: the model does"):
        executor.start()
    assert "Traceback" not in caplog.text  # the sentence says it all


@pytest.mark.parametrize(("module", "call"), [(subprocess, "Popen"), (os, "pidfd_open")])
def test_start_leaves_no_process_and_no_descriptor_when_a_worker_cannot_be_started(
    make_executor: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, call: str
) -> None:
    """The fixture checks what is left."""
    caplog.set_level(logging.CRITICAL, workers.__name__)  # a record of the error would keep the executor
    executor = make_executor()
    works = getattr(module, call)

    def fails(*given: Any, **named: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(module, call, fails)
    with pytest.raises(ExecutorError, match=r"^the workers could not be started .* too many open files"):
        executor.start()
    monkeypatch.setattr(module, call, works)


def test_start_logs_the_traceback_of_an_unexpected_error_once(
    make_executor: Make, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor(**{"0": {"at": "start", "do": "unexpected"}})
    with pytest.raises(ExecutorError, match=r"rank 0 .* failed in weights: ValueError: this was not expected"):
        executor.start()
    assert caplog.text.count("Traceback") == 1
    assert "in unexpected" in caplog.text


def test_executor_raises_one_error_when_all_ranks_fail_together(make_executor: Make, make_step: MakeStep) -> None:
    fault = {"at": 1, "do": "out_of_memory"}
    executor = make_executor(2, **{"0": fault, "1": fault})
    executor.start()
    with pytest.raises(ExecutorError, match=r"the worker of rank [01] .* failed in step 1: OutOfMemoryError"):
        run(executor, make_step(1))


def test_shutdown_during_start_does_not_wait(make_executor: Make, until: Make, worker_pids: Pids) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    executor = make_executor(2, **{"1": {"at": "start", "do": "sleep_for_ever"}})
    executor.watch(interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.start()
    assert worker_pids() == []


@pytest.mark.parametrize(("do", "status"), [("kill", "was killed by SIGKILL"), ("leave", "exited with code 3")])
def test_start_reports_the_exit_of_a_worker(make_executor: Make, do: str, status: str) -> None:
    executor = make_executor(2, **{"1": {"at": "start", "do": do}})
    begun = time.monotonic()
    with pytest.raises(ExecutorError, match=rf"the worker of rank 1 \(process \d+\) {status} in weights"):
        executor.start()
    assert time.monotonic() - begun < PROMPT


@pytest.mark.parametrize("ranks", [1, 2])
def test_exit_of_a_worker_wakes_the_caller(make_executor: Make, make_step: MakeStep, until: Make, ranks: int) -> None:
    executor = make_executor(ranks, delay=1000)
    executor.start()
    pending = executor.submit(make_step(1))
    pid = executor._workers.workers[ranks - 1]._process.pid
    killed: list[float] = []

    def kill() -> None:
        until(lambda: executor._heartbeats[ranks - 1].begun == 1)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(ExecutorError, match=rf"rank {ranks - 1} \(process {pid}\) was killed by SIGKILL in step 1;"):
        pending.result()
    assert time.monotonic() - killed[0] < PROMPT
    assert f"rank {ranks - 1}" in executor.check().detail
    assert not executor.check().ok
    with pytest.raises(ExecutorError, match="SIGKILL"):
        executor.submit(make_step(2))


def test_check_reports_the_exit_of_an_idle_worker(make_executor: Make, until: Make, worker_pids: Pids) -> None:
    executor = make_executor(2)
    executor.start()
    assert executor.check().ok
    os.kill(worker_pids()[0], signal.SIGTERM)
    until(lambda: not executor.check().ok)
    assert "SIGTERM" in executor.check().detail
    until(lambda: worker_pids() == [])  # the other is ended


@pytest.mark.parametrize("at", [2, -2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_error_names_rank_and_step(
    make_executor: Make, make_step: MakeStep, ranks: int, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor(ranks, **{str(ranks - 1): {"at": at, "do": "out_of_memory"}, "delay": 0.01})
    executor.start()
    assert run(executor, make_step(1)) == [1]
    said = rf"rank {ranks - 1} .* failed in step 2: OutOfMemoryError: no memory left; use a lower --max-batch-tokens"
    with pytest.raises(ExecutorError, match=said):
        run(executor, *map(make_step, (2, 3, 4)), *([make_step(5)] * 1000))
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize(
    ("at", "do", "place"),
    [
        (2, "sleep_for_ever", r"its stack is sleep_for_ever \(fake_worker.py:\d+\) < _fault .* < launch"),
        (
            -2,
            "sleep_for_ever",
            r"its stack is sleep_for_ever \(fake_worker.py:\d+\) < _fault .* < result .* < _send_result",
        ),
        (2, "stop", r"it gives no stack: it is stopped \(SIGSTOP\)"),
    ],
)
def test_hung_step_fails_with_the_stack_of_the_late_rank(
    make_executor: Make,
    make_step: MakeStep,
    until: Make,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    at: int,
    do: str,
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mark = tmp_path / "mark"
    executor = make_executor(2, step_timeout=60.0, **{"0": {"at": at, "do": do}, "mark": str(mark)})
    executor.start()
    assert run(executor, make_step(1)) == [1]
    pending = executor.submit(make_step(2))
    until(lambda: mark.exists() and executor._heartbeats[1].finished == 2)
    if do == "stop":
        stat = Path(f"/proc/{executor._workers.workers[0]._process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    else:
        monkeypatch.setattr(workers, "STACK_SECONDS", PROMPT)
    clock.ahead += 60.0
    with pytest.raises(ExecutorError, match=r"^step 2 took more than 60 s \(option step_timeout\)") as hung:
        pending.result()
    assert re.search(rf"the worker of rank 0 \(process \d+\): {place}", str(hung.value))
    assert ("Current thread" in caplog.text) == (do == "sleep_for_ever")


def test_slow_step_does_not_count_as_hung(
    make_executor: Make, make_step: MakeStep, until: Make, clock: Any, tmp_path: Path
) -> None:
    executor = make_executor(step_timeout=60.0, hold=str(tmp_path))
    executor.start()

    def pass_time(seconds: float) -> None:
        clock.ahead += seconds
        executor._workers._check_hung(clock.monotonic())

    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    (tmp_path / "1").touch()
    until(lambda: executor._heartbeats[0].finished == 1)
    pass_time(40)  # the first result is there, and is not asked for
    first.result()
    pass_time(40)  # 80 s for both together
    (tmp_path / "2").touch()
    second.result()
    pass_time(100)  # idle is not hung either
    assert executor.check().ok
    (tmp_path / "3").touch()
    assert run(executor, make_step(3)) == [3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_finished_step_does_not_count_as_hung_while_its_result_is_not_asked_for(
    make_executor: Make, make_step: MakeStep, until: Make, ranks: int
) -> None:
    executor = make_executor(ranks)
    executor.start()
    pending = executor.submit(make_step(1))
    until(lambda: all(row.finished == 1 for row in executor._heartbeats))
    executor._workers._check_hung(time.monotonic() + 1000)
    assert executor.check().ok
    assert pending.result().tokens == ((1,),)
    executor.submit(make_step(2))
    until(lambda: all(row.finished == 2 for row in executor._heartbeats))
    os.kill(executor._workers.workers[ranks - 1]._process.pid, signal.SIGKILL)
    until(lambda: not executor.check().ok)
    assert f"rank {ranks - 1}" in executor.check().detail
    assert "SIGKILL" in executor.check().detail


def test_hung_step_is_found_when_an_earlier_step_had_its_number(
    make_executor: Make,
    make_step: MakeStep,
    until: Make,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(workers, "STACK_SECONDS", PROMPT)
    executor = make_executor(step_timeout=60.0, hold=str(tmp_path))
    executor.start()
    (tmp_path / "0").touch()
    assert run(executor, make_step(0)) == [0]  # as of the rehearsal, all of whose steps have this number
    (tmp_path / "0").unlink()
    pending = executor.submit(make_step(0))
    until(lambda: executor._heartbeats[0].begun == 2)
    clock.ahead += 60.0
    with pytest.raises(ExecutorError, match=r"^step 0 took more than 60 s .*rank 0 .*: its stack is .*result"):
        pending.result()


def test_check_returns_the_heartbeat_of_a_stopped_idle_worker(
    make_executor: Make, make_step: MakeStep, until: Make, worker_pids: Pids
) -> None:
    executor = make_executor(2)
    executor.start()
    run(executor, make_step(1))
    until(lambda: all(row.finished == 1 for row in executor._heartbeats))
    until(lambda: executor.check().heartbeat is not None and time.monotonic() - executor.check().heartbeat < 0.6)
    pid = executor._workers.workers[1]._process.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: executor.check().rank == 1 and time.monotonic() - executor.check().heartbeat > 1)
    assert executor.check().ok
    begun = time.monotonic()
    executor.shutdown()  # it does not listen, and is killed
    assert time.monotonic() - begun < STOP_SECONDS + PROMPT


@pytest.mark.parametrize("ranks", [1, 2])
def test_call_runs_between_the_steps_before_and_after(
    make_executor: Make, make_step: MakeStep, until: Make, tmp_path: Path, ranks: int
) -> None:
    executor = make_executor(ranks, hold=str(tmp_path))
    executor.start()
    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.extend(executor.call("tell", {"of": [1, {"a": None}]})))
    caller.start()
    (tmp_path / "1").touch()
    until(lambda: executor._heartbeats[-1].finished == 1)
    assert answers == []
    (tmp_path / "2").touch()
    caller.join(PROMPT)
    assert answers == [{"rank": rank, "of": [1, {"a": None}]} for rank in range(ranks)]
    assert [first.result().tokens, second.result().tokens] == [((1,),), ((2,),)]
    (tmp_path / "3").touch()
    assert run(executor, make_step(3)) == [3]


@pytest.mark.parametrize("error", ["control", "unexpected"])
def test_call_names_the_rank_that_fails_and_steps_go_on(make_executor: Make, make_step: MakeStep, error: str) -> None:
    executor = make_executor(2)
    executor.start()
    text = "it went wrong" if error == "control" else "fail failed: ValueError: it went wrong"
    with pytest.raises(ControlError, match=rf"^the worker of rank 1 \(process \d+\): {text}$"):
        executor.call("fail", {"rank": 1, "error": error})
    assert run(executor, make_step(1)) == [1]
    assert len(executor.call("tell", {})) == 2
    assert executor.check().ok


def test_call_fails_with_the_worker_whose_device_fails(make_executor: Make, make_step: MakeStep) -> None:
    executor = make_executor(2)
    executor.start()
    words = r"rank 1 \(process \d+\) failed in the control call fail: it went wrong"
    with pytest.raises(ExecutorError, match=words):
        executor.call("fail", {"rank": 1, "error": "device"})
    for use in (lambda: executor.submit(make_step(1)), lambda: executor.call("tell", {})):
        with pytest.raises(ExecutorError, match=words):
            use()


def test_call_reports_a_worker_that_dies_in_it(make_executor: Make) -> None:
    executor = make_executor(2, **{"0": {"at": "tell", "do": "kill"}})
    executor.start()
    with pytest.raises(ExecutorError, match=r"rank 0 \(process \d+\) was killed by SIGKILL"):
        executor.call("tell", {})


def test_hung_call_fails_with_the_stack_of_the_late_rank(
    make_executor: Make,
    until: Make,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(workers, "STACK_SECONDS", PROMPT)
    mark = tmp_path / "mark"
    executor = make_executor(2, step_timeout=60.0, **{"1": {"at": "tell", "do": "sleep_for_ever"}, "mark": str(mark)})
    executor.start()
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(executor.call, "tell", {})
        until(lambda: mark.exists() and executor._workers._answered == {0})
        clock.ahead += 60.0
        with pytest.raises(
            ExecutorError, match=r"^the control call tell took more than 60 s .*rank 1 .*stack is sleep_for_ever"
        ):
            call.result()
    assert "has not finished the control call tell" in caplog.text


def test_shutdown_is_orderly_and_may_be_repeated(make_executor: Make, make_step: MakeStep) -> None:
    executor = make_executor(2)
    executor.shutdown()
    executor = make_executor(2)
    executor.start()
    executor.submit(make_step(1))
    processes = executor._workers.workers
    executor.shutdown()
    executor.shutdown()
    assert [worker._process.returncode for worker in processes] == [0, 0]
    assert not executor.check().ok
    with pytest.raises(ExecutorError, match="shut down"):
        executor.submit(make_step(2))


def test_workers_outlive_the_thread_that_started_the_executor(make_executor: Make, make_step: MakeStep) -> None:
    executor = make_executor()
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert run(executor, make_step(1)) == [1]


def test_workers_die_with_a_killed_parent(until: Make, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from types import SimpleNamespace\n"
        "from engine.core.config import EngineConfig, ExecutorConfig\n"
        "from engine.core.device import DeviceInfo\n"
        "from engine.core.executors import Deployment\n"
        "from engine.plugins.executors.multiproc import MultiprocExecutor, Options\n"
        "MultiprocExecutor.worker = 'fake_worker'\n"
        "config = EngineConfig(executor=ExecutorConfig(device='cpu', tensor_parallel=2))\n"
        "parts = SimpleNamespace(choices=(), manifest=(), drafter=None, speculates=False)\n"
        "executor = MultiprocExecutor(Deployment(config, parts, None, DeviceInfo(type='cpu')), Options())\n"
        "executor.start()\n"
        "print(*[worker._process.pid for worker in executor._workers.workers], flush=True)\n"
        "time.sleep(100)\n"
    )
    before = set(os.listdir("/dev/shm"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        parent.kill()
    until(lambda: not any(lives(pid) for pid in pids))
    assert {name for name in os.listdir("/dev/shm") if "engine" in name} <= before
    assert list(tmp_path.iterdir()) == [script]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_full_shared_memory_is_an_error(
    make_executor: Make, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "free_bytes", lambda _: 1000)
    with pytest.raises(RingSpaceError, match="/dev/shm"):
        make_executor().start()
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    executor = make_executor()
    executor.start()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(overflow, "write", full)
    prompt = tuple(range(100_000))
    new = NewSequence(sequence=1, tokens=prompt, prompt_len=len(prompt), params=SamplingParams(seed=0))
    with pytest.raises(ExecutorError, match="/dev/shm"):
        executor.submit(Step(id=1, decodes=(), chunks=(), new=(new,)))


def test_executors_refuse_the_wrong_number_of_ranks() -> None:
    cpu = DeviceInfo(type="cpu")
    one, two = (EngineConfig(executor=ExecutorConfig(tensor_parallel=ranks)) for ranks in (1, 2))
    assert UniprocExecutor.refuses(one, cpu) is None
    assert "use --executor tp" in (UniprocExecutor.refuses(two, cpu) or "")
    assert MultiprocExecutor.refuses(one, cpu) is None
    assert "use --executor tp" in (MultiprocExecutor.refuses(two, cpu) or "")
    assert "give their number by --tp" in (TensorParallelExecutor.refuses(one, cpu) or "")
    assert TensorParallelExecutor.refuses(two, cpu) is None


def test_constructor_refuses_a_plugin_passed_in_as_an_object(make_deployment: Make) -> None:
    choice = SimpleNamespace(extension_point="attention", name="Mine", provenance="object")
    with pytest.raises(PluginError, match="'Mine' was passed in as an object, which other processes cannot have"):
        MultiprocExecutor(make_deployment(EngineConfig(), choice), Options())


def test_errors_lists_every_error_class_of_the_engine() -> None:
    from engine.core import errors
    from engine.plugins.executors.control_messages import ERRORS

    named = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, EngineError)}
    never_end_a_worker = {errors.InvalidRequestError, errors.ControlError, errors.ControlBusyError}
    assert set(ERRORS) == named - {EngineError} - never_end_a_worker
