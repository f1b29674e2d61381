"""The report of /health."""

from __future__ import annotations

from engine.server.http.health_report import report
from engine.server.shared.heartbeat import Fault

DEAD = Fault(level="process", reason="it died", since=5.0)
HANGS = Fault(level="loop", reason="it hangs", since=9.0)


def test_a_single_replica_is_reported_without_a_list() -> None:
    assert report([None]) == (200, {"status": "ok"})
    assert report([0.12345]) == (200, {"status": "ok", "step_seconds": 0.1235})
    assert report([DEAD]) == (503, DEAD.body())


def test_several_replicas_are_listed() -> None:
    assert report([None, 0.5]) == (
        200,
        {
            "status": "ok",
            "replicas": [{"replica": 0, "status": "ok"}, {"replica": 1, "status": "ok", "step_seconds": 0.5}],
        },
    )


def test_one_healthy_replica_keeps_the_server_up() -> None:
    status, body = report([None, DEAD])
    assert (status, body["status"]) == (200, "degraded")
    assert body["replicas"] == [{"replica": 0, "status": "ok"}, {"replica": 1, **DEAD.body()}]


def test_a_restarting_replica_is_reported_as_starting() -> None:
    starting = Fault(level="process", reason="it died", since=5.0, starting=True, restart="try 1 of 5")
    status, body = report([None, starting])
    assert (status, body["status"]) == (200, "degraded")
    assert body["replicas"][1] == {"replica": 1, **DEAD.body(), "status": "starting", "restart": "try 1 of 5"}
    status, body = report([DEAD, starting])
    assert status == 503


def test_the_latest_fault_is_on_top_when_all_replicas_failed() -> None:
    status, body = report([HANGS, DEAD])
    assert (status, body["status"], body["level"], body["since"]) == (503, "failed", "loop", HANGS.body()["since"])
    assert [each["level"] for each in body["replicas"]] == ["loop", "process"]
