from __future__ import annotations

import asyncio
from typing import Any

import attrs

from engine.core.executors import encode
from engine.core.types import CacheInfo, EngineStats, HistogramCounts, SpeculationStats
from engine.server.ray_serve.cluster_state import OF_ONE_ENGINE, ClusterState, RayService, merged
from engine.server.ray_serve.messages import ReplicaState

CACHE = CacheInfo(
    num_blocks=100,
    block_size=16,
    weights_bytes=1,
    activation_bytes=1,
    kv_bytes=1,
    budget_bytes=1,
    device="cpu",
    dtype="float32",
)


def test_statistics_of_several_engines_are_summed_field_by_field() -> None:
    one = EngineStats(
        running=2,
        blocks_by_kind=(("window", 3, 4), ("full", 5, 6)),
        seconds=(("schedule", 0.5),),
        step_tokens=HistogramCounts((1, 0, 2), 7.0),
        speculation=SpeculationStats(verified=(5, 3), accepted=(2, 1), faults=1),
    )
    other = EngineStats(running=3, seconds=(("wait", 1.0), ("schedule", 0.25)), step_tokens=HistogramCounts())
    total = merged([one, other, one])
    assert total.running == 7
    assert total.blocks_by_kind == (("window", 6, 8), ("full", 10, 12))
    assert total.seconds == (("schedule", 1.25), ("wait", 1.0))
    assert total.step_tokens == HistogramCounts((2, 0, 4), 14.0)
    assert total.speculation == SpeculationStats(verified=(10, 6), accepted=(4, 2), faults=2)
    assert merged([]) == EngineStats()
    names = {field.name for field in attrs.fields(EngineStats)}
    assert names > OF_ONE_ENGINE
    assert all(getattr(merged([one]), name) is not None for name in names - OF_ONE_ENGINE)


class Broadcast:
    def __init__(self, answers: list[object] | Exception) -> None:
        self._answers = answers

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[object]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


def test_the_state_has_a_fault_while_no_replica_can_answer() -> None:
    healthy = encode(ReplicaState("b", EngineStats(running=1)))
    broken = encode(ReplicaState("a", EngineStats(), level="loop", reason="it is stuck", since=5.0))
    answers: list[Any] = [
        [healthy, broken, RuntimeError("a replica that just died")],
        [broken],
        RuntimeError("no replica is known"),
    ]

    class Engines:
        def broadcast(self, method: str) -> Broadcast:
            assert method == "report"
            return Broadcast(answers.pop(0))

    async def main() -> None:
        state = ClusterState(Engines(), 60.0)
        await state.update()
        assert [report.replica for report in state.reports] == ["a", "b"]
        assert state.fault() is None
        service = RayService.__new__(RayService)
        service.state, service.cache, service._prefix_caching = state, CACHE, True
        (report,) = service.engine_reports()
        assert (report.up, report.stats.running, report.cache, report.prefix_caching) == (True, 1, CACHE, True)
        assert [fault is None for fault in service.faults()] == [False, True]
        await state.update()
        fault = state.fault()
        assert fault is not None
        assert (fault.level, fault.reason, fault.since) == ("loop", "it is stuck", 5.0)
        await state.update()
        fault = state.fault()
        assert fault is not None
        assert fault.reason == "no replica of the engine is running"

    asyncio.run(main())
