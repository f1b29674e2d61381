"""Probes: single drafts of requests whose drafts do not pay, to notice when they would."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define

_INTERVAL, _MAX_INTERVAL = 16, 512
"""Steps from a probe to the next one of the same request: doubled with each probe that fails, up to the maximum."""
_SHARE = 0.005
"""Share of the time of all steps that probes that fail may take."""
_SAVED_STEPS = 64
"""Steps whose time for probes may be saved up."""


@define
class _Turn:
    next_step: int = 0
    interval: int = _INTERVAL


class Probes:
    """Which requests may be probed in a step, as far as time was saved up for it."""

    def __init__(self) -> None:
        self._step = 0
        self._saved = 0.0
        self._cost = 0.0
        self._turns: dict[str, _Turn] = {}
        self._running: set[str] = set()

    def begin(self, time: float, cost: float) -> None:
        """Begin a step. time: of the step without drafts; cost: that a probe would add to it and the next one."""
        self._step += 1
        self._cost = cost
        self._saved = min(self._saved + _SHARE * time, max(_SHARE * time * _SAVED_STEPS, cost))

    def revise(self, cost: float) -> None:
        """Correct the cost of a probe in the step that has begun."""
        self._cost = cost

    @property
    def affordable(self) -> bool:
        """Whether the time saved up suffices for a probe."""
        return self._saved >= self._cost

    @property
    def indebted(self) -> bool:
        """Whether more time was spent than saved up."""
        return self._saved < 0

    def is_due(self, request_id: str) -> bool:
        """Whether the last probe of a request is long enough ago."""
        turn = self._turns.get(request_id)
        return turn is None or self._step >= turn.next_step

    def may(self, request_id: str) -> bool:
        """Whether a request may be probed in this step."""
        return self.affordable and self.is_due(request_id)

    def pay(self) -> None:
        """Pay for a step with probes."""
        self._saved -= self._cost

    def spend(self, time: float) -> None:
        """Spend lost time; negative: time gained."""
        self._saved -= time

    def start(self, request_id: str) -> None:
        """Probe a request in this step."""
        turn = self._turns.setdefault(request_id, _Turn())
        turn.next_step = self._step + turn.interval
        turn.interval = min(2 * turn.interval, _MAX_INTERVAL)
        self._running.add(request_id)

    def clear(self) -> None:
        """Begin to choose drafts: those of this step are not probes so far."""
        self._running.clear()

    @property
    def running(self) -> bool:
        """Whether a draft of the latest step with drafts is a probe."""
        return bool(self._running)

    def accepted(self, requests: Iterable[str], worth: float) -> None:
        """Note that drafts of each of these requests were accepted. worth: the time of a token without drafts."""
        if not (self._running or self._turns):
            return
        for request_id in requests:
            if request_id in self._running:
                self.spend(-worth)
            if request_id in self._turns:
                self._turns[request_id] = _Turn(next_step=self._step + 1)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._turns.pop(request_id, None)
        self._running.discard(request_id)
