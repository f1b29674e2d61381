"""The answer of /health: the state of each replica and of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.shared.heartbeat import Fault, HealthStatus

State = float | Fault | None
"""State of one replica: its fault, or the seconds that a requested step took, or None if no step was requested."""


def report(states: Sequence[State]) -> tuple[int, dict[str, Any]]:
    """HTTP status and body: 200 while at least one replica is healthy. A single replica is reported without a list."""
    bodies = [_body(state) for state in states]
    if len(bodies) == 1:
        return (503 if isinstance(states[0], Fault) else 200), bodies[0]
    replicas = [{"replica": number, **body} for number, body in enumerate(bodies)]
    faults = [state for state in states if isinstance(state, Fault)]
    if len(faults) == len(states):  # the server has been down since its last replica failed
        return 503, {**max(faults, key=lambda fault: fault.since).body(), "replicas": replicas}
    status: HealthStatus = "degraded" if faults else "ok"
    return 200, {"status": status, "replicas": replicas}


def _body(state: State) -> dict[str, Any]:
    if isinstance(state, Fault):
        return state.body()
    return {"status": "ok"} if state is None else {"status": "ok", "step_seconds": round(state, 4)}
