"""Control operations on one rank: arguments are checked, errors are sentences, and GPU memory needs a GPU."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import ControlError
from engine.core.runner import control
from engine.core.runner.control import Control, NoArguments, Operation, Rank
from engine.core.runner.memory_history import MemoryHistory


def make_control(device: DeviceInfo) -> Control:
    state: Any = SimpleNamespace(persistent_batch=SimpleNamespace(sequences=lambda: (4, 9)))
    trace: Any = None
    layers: Any = None
    memory = MemoryHistory(device)
    return Control(Rank(rank=1, ranks=2, device=device, state=state, memory=memory, trace=trace, layers=layers))


CPU = make_control(DeviceInfo(type="cpu"))


def test_describe_tells_rank_and_sequences() -> None:
    answer = CPU.call("describe", {})
    assert (answer["rank"], answer["ranks"], answer["device"], answer["sequences"]) == (1, 2, "cpu", (4, 9))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("describr", {}, "no control operation 'describr'; did you mean describe"),
        ("describe", {"loudly": True}, "wrong arguments of describe: .*loudly.*takes: no arguments"),
        (
            "record_memory",
            {"max_entries": "many"},
            "of record_memory: Expected `int`.*max_entries, stacks",
        ),
        ("memory_snapshot", {}, "required field `directory`"),
        ("memory_snapshot", {"directory": "x"}, "no allocation history of cpu: .*GPU memory only"),
        ("record_memory", {}, "no allocation history of cpu"),
    ],
)
def test_a_call_is_refused_with_a_sentence(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ControlError, match=words):
        CPU.call(name, arguments)


def test_an_unexpected_error_names_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: Rank, arguments: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(control, "OPERATIONS", {"fail": Operation(NoArguments, fail)})
    with pytest.raises(ControlError, match=r"^fail failed: KeyError: 'gone'$"):
        CPU.call("fail", {})


@pytest.mark.gpu
def test_memory_snapshot_holds_recorded_allocations(tmp_path: Path) -> None:
    on_gpu = make_control(DeviceInfo(type="cuda"))
    on_gpu.call("record_memory", {"max_entries": 1000})
    kept = torch.zeros(2**20, device="cuda")
    file = on_gpu.call("memory_snapshot", {"directory": str(tmp_path / "new")})
    on_gpu.call("record_memory", {"max_entries": 0})
    assert file == str(tmp_path / "new" / "memory-rank1.pickle")
    snapshot = pickle.loads(Path(file).read_bytes())
    traced = [event for events in snapshot["device_traces"] for event in events]
    assert any(event["action"] == "alloc" and event["size"] >= kept.nbytes for event in traced)
