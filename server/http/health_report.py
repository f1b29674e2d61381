"""What /health answers: the state of each replica, and of them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.shared.heartbeat import Fault

State = float | Fault | None
"""Of one replica: what is wrong with it, else the seconds that a step took, or None where none was asked for."""


def report(states: Sequence[State]) -> tuple[int, dict[str, Any]]:
    """Status and body: a server is well while one replica is. Where there is one, the body is about that alone."""
    bodies = [_body(state) for state in states]
    if len(bodies) == 1:
        return (503 if isinstance(states[0], Fault) else 200), bodies[0]
    replicas = [{"replica": number, **body} for number, body in enumerate(bodies)]
    faults = [state for state in states if isinstance(state, Fault)]
    if len(faults) == len(states):  # the server is down since the last of them is
        return 503, {**max(faults, key=lambda fault: fault.since).body(), "replicas": replicas}
    return 200, {"status": "degraded" if faults else "ok", "replicas": replicas}


def _body(state: State) -> dict[str, Any]:
    if isinstance(state, Fault):
        return state.body()
    return {"status": "ok"} if state is None else {"status": "ok", "step_seconds": round(state, 4)}
