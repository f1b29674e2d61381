"""The executor on two Ray nodes of this machine: with a model, and with actors that have none and that fail."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from engine.core import Engine, SamplingParams
from engine.core.config.tree import EngineConfig, ExecutorConfig, ModelConfig
from engine.core.errors import CapacityError, ControlError, ExecutorError, PluginError
from engine.core.grammars.grammar import Grammar
from engine.core.hooks import hookimpl
from engine.core.plugin_host.load import load_plugins
from engine.core.startup import Progress
from engine.core.types import NewSequence, Step
from engine.plugins.executors.ray import Options, RayExecutor
from engine.plugins.executors.ray_actor import RankActor
from engine.testing.executors import ExecutorConformance
from tests.core.told_speculator import Told

ray = pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file <_io:ResourceWarning")  # by older versions of Ray

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]
MARK = "ENGINE_TEST_OF_RAY"
"""An environment variable that all processes of the cluster have."""
WORKER = r"the worker of rank {} \(process \d+ on node [\d.]+\)"
Make = Callable[..., Any]
MakeStep = Callable[[int], Step]


@pytest.fixture(scope="module")
def address(until: Make) -> Iterator[str]:
    """Of a cluster of two nodes with one CPU each. Afterwards no process of it is left, and no file."""
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it is part of sockets' names
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 unless set: next to nothing of a busy machine
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the user's home
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv(MARK, directory)
        patch.syspath_prepend(str(Path(__file__).parent))
        handler = signal.getsignal(signal.SIGTERM)
        cluster = Cluster()
        try:
            common = {"num_cpus": 1, "object_store_memory": 80 << 20, "plasma_directory": directory}
            cluster.add_node(**common, include_dashboard=False)
            cluster.add_node(**common)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)
            until(lambda: marked(directory) == [], 60)
            shutil.rmtree(directory)
            gc.collect()  # what Ray has not closed, before later tests come upon it


def marked(directory: str) -> list[str]:
    """The processes that the cluster has started, but those that only wait to be reaped."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes() if process.name.isdigit() else b""
        except OSError:  # it ended, or is another user's
            continue
        if f"{MARK}={directory}".encode() in environment.split(b"\0"):
            found.append(process.name)
    return found


@pytest.fixture
def make_executor(address: str, until: Make, make_deployment: Make) -> Iterator[Make]:
    """make_executor(ranks, **options, **behaviour of fake_worker.py): not started; shut down after the test.

    Whatever a test does, no actor is left, and this process has left the cluster.
    """
    made: list[RayExecutor] = []

    class FakeExecutor(RayExecutor):
        actor = importlib.import_module("fake_actor").FakeActor

    def make(ranks: int = 2, options: dict[str, Any] | None = None, **behaviour: Any) -> RayExecutor:
        config = EngineConfig(
            model=ModelConfig(path="nowhere", options=behaviour),
            executor=ExecutorConfig(device="cpu", tensor_parallel=ranks),
        )
        made.append(FakeExecutor(make_deployment(config), Options(**{"address": address, **(options or {})})))
        return made[-1]

    yield make
    while made:
        made.pop().shutdown()
    assert not ray.is_initialized()
    until(lambda: actors() == [], 60)


def actors() -> list[int]:
    """The processes of actors."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if b"FakeActor" in command or b"RankActor" in command:
            found.append(int(process.name))
    return found


def process_of(executor: Any, rank: int) -> int:
    return int(executor._workers.workers[rank].location.process)


def build(checkpoint: Path, address: str, **settings: Any) -> Engine:
    common = {"executor__device": "cpu", "executor__threads": 1, "cache__memory": "8MiB", "model__max_len": 256}
    if settings.get("executor") == "ray":
        common["executor__options"] = {"address": address}
    return Engine(model=str(checkpoint), **{**common, **settings})


class TestRay(ExecutorConformance):
    executor = RayExecutor
    refused_ranks = None
    excused = ("open file .*/logs/python-core-driver-", "open file socket")  # of Ray, once a connection to the cluster

    @pytest.fixture(autouse=True)
    def in_cluster(self, address: str) -> None:
        self.settings = {"executor__options": {"address": address}}


def test_the_same_tokens_on_two_nodes_as_in_one_process(engine_checkpoint: Path, address: str) -> None:
    with build(engine_checkpoint, address) as one:
        expected = [made.token_ids for made in one.generate(PROMPTS, GREEDY)]
    drafts: dict[str, Any] = {"speculator": Told, "speculator__length": "fixed"}
    with build(engine_checkpoint, address, executor="ray", executor__tensor_parallel=2, **drafts) as two:
        executor: Any = two._executor
        assert len({worker.location.node for worker in executor._workers.workers}) == 2
        assert [made.token_ids for made in two.generate(PROMPTS, GREEDY)] == expected
        assert {"import", "plugins", "ranks", "weights", "kv_cache"} <= set(dict(two.cache_info.phases))
        asked = attrs.evolve(GREEDY, grammar=Grammar.regex("[a-f]{24,30}"), frequency_penalty=0.5, ignore_eos=False)
        alone = [made.token_ids for made in two.generate(PROMPTS, asked)]
        Told.tell(dict(zip(map(tuple, PROMPTS), alone, strict=True)), 3)
        assert [made.token_ids for made in two.generate(PROMPTS, asked)] == alone
        Told.tell({})
        assert sum(two.stats().speculation.accepted) > 0
        stream = two.stream(PROMPTS[0], attrs.evolve(GREEDY, max_tokens=None))
        next(stream)
        os.kill(process_of(executor, 1), signal.SIGKILL)
        with pytest.raises(ExecutorError, match=rf"^{WORKER.format(1)} died in step \d+: The actor is dead"):
            list(stream)
        assert not two.check().ok
        assert ray.is_initialized()
    assert not ray.is_initialized()


def test_a_relative_model_path_starts_from_the_engines_directory_and_not_from_the_nodes(
    engine_checkpoint: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(engine_checkpoint.parent)  # the cluster's processes stay in the directory that it was started in
    with build(Path(engine_checkpoint.name), address, executor="ray") as engine:
        assert len(engine.generate(PROMPTS[:1], GREEDY)[0].token_ids) == 24


def test_one_device_and_plugins_that_its_node_lacks(
    engine_checkpoint: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Here:
        @staticmethod
        @hookimpl
        def engine_started(engine: Engine) -> None:
            """Do nothing."""

    message = r"rank 0 .* failed in plugins: this process lacks Here object .*same Python"
    with pytest.raises(PluginError, match=message):
        build(engine_checkpoint, address, executor="ray", plugins=load_plugins(extra=[Here()]))
    assert not ray.is_initialized()


def test_executor_returns_results_in_order_of_steps(make_executor: Make, make_step: MakeStep) -> None:
    reports: list[Progress] = []
    executor = make_executor()
    executor.watch(reports.append)
    handler = signal.getsignal(signal.SIGTERM)
    info = executor.start()
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray sets its own
    assert info.num_blocks == 99  # what the smallest has
    assert info.device == "rank 0"
    assert executor.asynchronous
    assert reports[0].phase == "placement"
    assert {(one.phase, one.rank) for one in reports[1:]} == {("weights", 0), ("weights", 1)}
    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    with pytest.raises(ExecutorError, match="step 3 was submitted while 2 others"):
        executor.submit(make_step(3))
    assert second.result().tokens == ((2,),)
    assert first.done()
    assert first.result().tokens == ((1,),)
    for number in range(3, 20, 2):  # a long message may be overtaken on its way, but not in the model
        prompt = tuple(range(100_000))
        new = NewSequence(sequence=1, tokens=prompt, prompt_len=len(prompt), params=SamplingParams(seed=0))
        long = executor.submit(Step(id=number, decodes=(), chunks=(), new=(new,)))
        short = executor.submit(make_step(number + 1))
        assert [one.result().tokens[0][0] for one in (long, short)] == [number, number + 1]
    assert executor.check().ok


def test_call_runs_between_steps_and_names_the_rank_that_fails(make_executor: Make, make_step: MakeStep) -> None:
    executor = make_executor()
    executor.start()
    steps = [executor.submit(make_step(number)) for number in (1, 2)]
    assert executor.call("tell", {"of": [1]}) == [{"rank": 0, "of": [1]}, {"rank": 1, "of": [1]}]
    assert [step.result().tokens[0][0] for step in steps] == [1, 2]
    with pytest.raises(ControlError, match=rf"^{WORKER.format(1)}: it went wrong$"):
        executor.call("fail", {"rank": 1, "error": "control"})
    assert executor.submit(make_step(3)).result().tokens == ((3,),)
    for _ in range(2):
        with pytest.raises(ExecutorError, match=rf"^{WORKER.format(0)} failed in the control call fail: it went wrong"):
            executor.call("fail", {"rank": 0, "error": "device"})


def test_executor_returns_a_result_while_the_next_step_runs(
    make_executor: Make, make_step: MakeStep, tmp_path: Path
) -> None:
    executor = make_executor(1, hold=str(tmp_path))
    executor.start()
    first, second = executor.submit(make_step(1)), executor.submit(make_step(2))
    assert not first.done()
    (tmp_path / "1").touch()
    first.result()
    assert not second.done()
    (tmp_path / "2").touch()
    second.result()


def test_start_raises_a_worker_error_with_its_class(make_executor: Make) -> None:
    executor = make_executor(**{"1": {"at": "start", "do": "capacity"}})
    with pytest.raises(CapacityError, match=rf"^{WORKER.format(1)} failed in weights: the model does not fit"):
        executor.start()


@pytest.mark.parametrize("at", [1, -1])
def test_step_error_names_rank_and_step(
    make_executor: Make, make_step: MakeStep, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    executor = make_executor(**{"1": {"at": at, "do": "out_of_memory"}})
    executor.start()

    def run() -> None:
        for number in itertools.count(1):  # rank 0 may do some without the other
            executor.submit(make_step(number)).result()

    with pytest.raises(ExecutorError, match=rf"^{WORKER.format(1)} failed in step 1: OutOfMemoryError: .*--max-batch"):
        run()
    assert "failed in step 1" in executor.check().detail
    with pytest.raises(ExecutorError, match="failed in step 1"):
        executor.submit(make_step(1000))
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize("at", ["start", 1])
def test_death_of_an_actor_is_reported(make_executor: Make, make_step: MakeStep, at: str | int) -> None:
    executor = make_executor(**{"0": {"at": at, "do": "kill"}})
    place = "(start|weights)" if at == "start" else "step 1"  # its last words may die with it

    def run() -> None:
        executor.start()
        executor.submit(make_step(1)).result()

    with pytest.raises(ExecutorError, match=rf"^{WORKER.format(0)} died in {place}: The actor is dead"):
        run()


def test_check_reports_the_death_of_an_idle_actor(make_executor: Make, make_step: MakeStep, until: Make) -> None:
    executor = make_executor()
    executor.start()
    executor.submit(make_step(1)).result()
    assert executor.check().ok
    os.kill(process_of(executor, 1), signal.SIGKILL)
    until(lambda: not executor.check().ok, 60)
    assert "the worker of rank 1" in executor.check().detail
    with pytest.raises(ExecutorError, match="the worker of rank 1"):
        executor.submit(make_step(2))


@pytest.mark.parametrize(
    ("do", "message"),
    [("sleep_for_ever", r"its stack is sleep_for_ever \(fake_worker.py:\d+\) < "), ("stop", "it gives no stack")],
)
def test_hung_step_fails_with_the_stack_of_the_late_rank(
    make_executor: Make, make_step: MakeStep, caplog: pytest.LogCaptureFixture, do: str, message: str
) -> None:
    executor = make_executor(options={"step_timeout": 3.0}, **{"1": {"at": 2, "do": do}, "0": {"at": -2, "do": do}})
    executor.start()
    executor.submit(make_step(1)).result()
    expected = rf"^step 2 took more than 3 s \(option step_timeout\); {WORKER.format('[01]')}: {message}"
    with pytest.raises(ExecutorError, match=expected):
        executor.submit(make_step(2)).result()
    assert caplog.text.count("has not finished step 2") == 2


def test_start_fails_when_the_cluster_has_no_room(make_executor: Make, address: str, until: Make) -> None:
    ray.init(address=address, logging_level=logging.WARNING)
    try:  # the CPUs of an actor that has ended are free a moment later
        until(lambda: ray.available_resources().get("CPU") == 2, 60)
    finally:
        ray.shutdown()
    message = (
        r"^Ray could not place 3 ranks of 1 CPU each within 1 s \(option placement_timeout\); the cluster has "
        r"1 CPU on [\d.]+, 1 CPU on [\d.]+, of which 2 CPU are free; "
    )
    with pytest.raises(ExecutorError, match=message):
        make_executor(3, options={"placement_timeout": 1.0}).start()


def test_shutdown_stays_in_a_cluster_joined_before(
    make_executor: Make, make_step: MakeStep, address: str, until: Make
) -> None:
    ray.init(address=address, logging_level=logging.WARNING)
    try:
        for given in (None, address):
            executor = make_executor(options={"address": given})
            executor.start()
            assert executor.submit(make_step(1)).result().tokens == ((1,),)
            executor.shutdown()
            executor.shutdown()
            assert not executor.check().ok
            assert ray.is_initialized()
            until(lambda: ray.available_resources().get("CPU") == 2, 60)
        with pytest.raises(ExecutorError, match=r"connected to Ray at .* already, not at elsewhere:1; leave out"):
            make_executor(options={"address": "elsewhere:1"}).start()
    finally:
        ray.shutdown()


def test_start_fails_on_a_node_without_the_actor_class(make_executor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    module.Elsewhere = type("Elsewhere", (RankActor,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    executor = make_executor(1)
    monkeypatch.setattr(type(executor), "actor", module.Elsewhere)
    message = (
        r"^the worker of rank 0 could not be started: ModuleNotFoundError: No module named 'only_here'; all nodes must"
    )
    with pytest.raises(ExecutorError, match=message):
        executor.start()


def test_start_fails_on_a_node_with_another_version(make_executor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(1)
    monkeypatch.setattr(type(executor), "actor", importlib.import_module("fake_actor").OtherVersion)
    message = rf"^{WORKER.format(0)} could not be started: .*EngineError: a message could not be read; all nodes must"
    with pytest.raises(ExecutorError, match=message):
        executor.start()


def test_start_fails_at_an_address_without_a_cluster(make_executor: Make) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no one else can take its port, and no one listens there
        free = "{}:{}".format(*silent.getsockname())
        with pytest.raises(ExecutorError, match=rf"^Ray cannot be joined at {free}: .*refused; see the option address"):
            make_executor(options={"address": free}).start()


def test_each_replica_of_a_server_is_placed_separately(engine_checkpoint: Path, address: str, until: Make) -> None:
    """Two nodes with room for one rank each: both replicas answer, from different nodes."""
    command = [sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "serve"]
    command += ["--model", str(engine_checkpoint), "--port", "0", "--api-workers", "1", "--device", "cpu"]
    command += ["--kv-memory", "8MiB", "--max-len", "256", "--threads", "1", "--replicas", "2"]
    command += ["--executor", "ray", "--executor-option", f"address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            lines: list[str] = []
            url = None
            for line in server.stdout:
                lines.append(line)
                if url := re.search(r"http://127\.0\.0\.1:\d+", line):
                    break
            assert url is not None, "".join(lines)
            deep = httpx.get(f"{url[0]}/health", params={"deep": 1}, timeout=60)
            assert deep.status_code == 200, deep.text
            assert len(deep.json()["replicas"]) == 2
            assert len(actors()) == 2
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert server.returncode == 0
    until(lambda: actors() == [], 60)
