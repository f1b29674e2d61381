"""What /health says of several replicas."""

from __future__ import annotations

from engine.server.http.health_report import report
from engine.server.shared.heartbeat import Fault

DEAD = Fault(level="process", reason="it died", since=5.0)
HANGS = Fault(level="loop", reason="it hangs", since=9.0)


def test_one_replica_is_answered_for_alone() -> None:
    assert report([None]) == (200, {"status": "ok"})
    assert report([0.12345]) == (200, {"status": "ok", "step_seconds": 0.1235})
    assert report([DEAD]) == (503, DEAD.body())


def test_each_replica_is_listed() -> None:
    assert report([None, 0.5]) == (
        200,
        {
            "status": "ok",
            "replicas": [{"replica": 0, "status": "ok"}, {"replica": 1, "status": "ok", "step_seconds": 0.5}],
        },
    )


def test_one_that_is_well_is_enough() -> None:
    status, body = report([None, DEAD])
    assert (status, body["status"]) == (200, "degraded")
    assert body["replicas"] == [{"replica": 0, "status": "ok"}, {"replica": 1, **DEAD.body()}]


def test_one_that_is_started_anew() -> None:
    starting = Fault(level="process", reason="it died", since=5.0, starting=True, restart="try 1 of 5")
    status, body = report([None, starting])
    assert (status, body["status"]) == (200, "degraded")
    assert body["replicas"][1] == {"replica": 1, **DEAD.body(), "status": "starting", "restart": "try 1 of 5"}
    status, body = report([DEAD, starting])
    assert status == 503


def test_when_none_is_left_the_last_reason_stands_first() -> None:
    status, body = report([HANGS, DEAD])
    assert (status, body["status"], body["level"], body["since"]) == (503, "failed", "loop", HANGS.body()["since"])
    assert [each["level"] for each in body["replicas"]] == ["loop", "process"]
