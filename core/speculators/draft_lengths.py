"""Chooses how many drafts of each sequence a step verifies: as many as make most tokens per time, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import define

from engine.core.speculators.step_costs import StepCosts

_MEMORY = 0.95
"""Weight of a trial relative to the next one in the acceptance of a request: about the last 20 trials count."""
_COMMON_MEMORY = 0.98
"""The same in the acceptance of all requests together, with which a new request begins."""
_PRIOR_TRIALS = 8.0
"""Number of trials that the acceptance of all requests stands for in that of one request."""
_FIRST_ACCEPTANCE = 0.5
"""The acceptance before the first trial of all."""
_MAX_ACCEPTANCE = 0.99
_PROBE_INTERVAL = 16
"""Steps until a request whose drafts do not pay is probed; doubled with each probe that fails, up to a maximum."""
_MAX_PROBE_INTERVAL = 512
_PROBE_SHARE = 0.005
"""Share of the time of all steps that probes that fail may take."""
_MIN_GAIN = 1.02
"""Minimum tokens per time with drafts, relative to those without, that count as a gain: estimates are not exact."""
_SAVED_STEPS = 64
"""Steps whose time for probes may be saved up."""
_MAX_PAUSE = 16
"""Maximum steps for which no request is asked after proposals that did not pay."""
_PROBED_AT_ONCE = 1.02
"""A probe takes further requests along as long as the step takes at most this much longer: the host's wait, which is
most of its cost, is the same."""
_SLOW_GAP, _LONGEST_GAP = 0.02, 4.0
"""Weight of a gap after the first 50; and the length, relative to the mean, beyond which a gap counts no further."""


@define
class _Gap:
    """The mean time for which the device is idle before a step with drafts."""

    time: float = 0.0
    count: int = 0

    def add(self, time: float) -> None:
        self.count += 1
        if self.count > 4:
            time = min(time, _LONGEST_GAP * self.time)
        self.time += (time - self.time) * max(_SLOW_GAP, 1 / self.count)


@define
class _Trials:
    """The verified drafts of one request: a trial per draft, up to and including the first that was rejected."""

    accepted: float = 0.0
    count: float = 0.0
    next_probe: int = 0
    """Step from which on the request may be probed, where its drafts do not pay."""
    interval: int = _PROBE_INTERVAL

    def add(self, verified: int, accepted: int, memory: float) -> None:
        trials = accepted + (accepted < verified)
        kept = memory**trials
        self.accepted = self.accepted * kept + accepted
        self.count = self.count * kept + trials


class DraftLengths:
    """Chooses draft lengths by the measured acceptance of each request and the measured times of steps.

    Where drafts are accepted with probability a if those before them are, draft number j adds a token with probability
    a^j.
    A step verifies the most probable drafts of all its sequences, as many as maximize

        (tokens without drafts + the sum of their probabilities) / the time of a step of that many rows.

    Per step: `begin`, then `limit` for each request that may have drafts, then `choose` if there are proposals; later
    `record` for each request whose drafts were verified. A request whose drafts do not pay is probed from time to time,
    with one draft; the probes that fail take at most 0.5 % of the time, those of all requests together.

    Where steps overlap, the host has to wait for the step in flight before it plans one with drafts, and for that one
    before it plans the next: the device is idle meanwhile, for the gap that `observe_gap` learns. `pays` is called
    between `limit` and `choose` then: it says whether to wait at all.
    """

    def __init__(
        self, costs: StepCosts, max_drafts: int, *, plain: StepCosts | None = None, overlaps: bool = False
    ) -> None:
        """costs: times of steps with drafts; plain: of those without, None: the same; overlaps: whether steps without
        drafts are planned while the step before them runs."""
        self._gaps: dict[int, _Gap] = {}
        """By magnitude of the number of sequences: the host takes longer for more of them."""
        self._overlaps = overlaps
        self._costs = costs
        self._plain = plain or costs
        self._max_drafts = max_drafts
        self._requests: dict[str, _Trials] = {}
        self._common = _Trials(accepted=_FIRST_ACCEPTANCE, count=1.0)
        self._powers = np.arange(1, max_drafts + 1)
        self._step = 0
        self._rows = self._tokens = 0
        self._time = 0.0
        """Time of this step without drafts."""
        self._gap = 0.0
        """Time for which the device is idle before this step if it has drafts."""
        self._least = 1.0
        """Probability below which no draft can pay in this step."""
        self._probe_time = 0.0
        """Time that one draft adds to this step, and to the next one, which does not overlap with it."""
        self._waiting_time = 0.0
        """Time that this step takes longer without drafts if it does not overlap with the step before."""
        self._saved = 0.0
        """Time that may be spent on probes."""
        self._probes: set[str] = set()
        """Requests whose draft in this step is a probe."""
        self._pause = self._pause_left = 0
        """Steps for which no request is asked, as long as proposals do not pay; and how many of them are left."""
        self._waited = False
        """Whether the host waits for drafts of this step, and none are chosen so far."""

    def begin(self, rows: int, tokens: int) -> bool:
        """Begin a step; False: no draft can pay in this step, so `limit` need not be called.

        rows: rows without drafts; tokens: how many of them yield a token.
        """
        if self._waited:  # in vain
            self._saved -= self._waiting_time
            self._waited = False
        self._step += 1
        self.revise(rows, tokens)
        most = max(_PROBE_SHARE * self._time * _SAVED_STEPS, self._probe_time)
        self._saved = min(self._saved + _PROBE_SHARE * self._time, most)
        if self._pause_left:
            self._pause_left -= 1
            return False
        return tokens > 0 and (self._least <= _MAX_ACCEPTANCE or self._saved >= self._probe_time)

    def revise(self, rows: int, tokens: int) -> None:
        """Correct the numbers of the step that has begun."""
        self._rows, self._tokens = rows, tokens
        most = max(tokens, 1) * self._max_drafts
        self._time = float(self._plain.table(rows)[rows])
        self._gap = self.gap(tokens)
        times = self._costs.table(rows + most)[rows : rows + 1 + most] + self._gap
        # The least time per row that any number of further rows has.
        further = times[1:] - self._time
        self._least = float((further / np.arange(1, most + 1)).min()) * tokens / self._time
        self._waiting_time = max(float(times[0]) - self._time, 0.0) if self._overlaps else 0.0
        self._probe_time = max(float(further[0]), 0.0) + self._waiting_time

    def limit(self, request_id: str) -> int:
        """Maximum drafts of a request that may pay in this step; 0: none, so no proposal is needed."""
        acceptance = self.acceptance(request_id)
        if acceptance >= self._least:
            if self._least <= 0:
                return self._max_drafts
            return min(self._max_drafts, int(math.log(self._least) / math.log(acceptance) + 1e-9))
        return int(self._may_probe(request_id))

    def pays(self, proposals: Sequence[tuple[str, int]]) -> bool:
        """Whether to wait for the step in flight, so that the step that has begun may have drafts.

        proposals: (request, number of drafts), by the tokens before the step in flight: the first draft of each is for
        a token that is sampled already.
        """
        if self._saved < 0:  # too often in vain
            return False
        proposals = [(request, length) for request, length in proposals if length]
        if sum(self._most_per_time(proposals, known=False)) or any(
            self._may_probe(request) for request, _ in proposals
        ):
            self._waited = True
            return True
        self._pause_asking(proposals)
        return False

    def choose(self, proposals: Sequence[tuple[str, int]]) -> list[int]:
        """How many drafts of each proposal to verify. proposals: (request, number of drafts)."""
        self._probes.clear()
        found = self._most_per_time(proposals)
        if any(found):
            self._pause = 0
        rows = self._rows + sum(found)
        limit: float | None = None
        for place, (request, length) in enumerate(proposals):
            if not length or found[place]:
                continue
            if limit is None and self._may_probe(request):
                limit = _PROBED_AT_ONCE * self._time_of(rows + 1)
                self._saved -= self._probe_time
            if limit is not None and self._is_due(request) and self._time_of(rows + 1) <= limit:
                self._probe(request)
                found[place] = 1
                rows += 1
        if any(found):
            self._waited = False
        else:
            self._pause_asking(proposals)
        return found

    def _most_per_time(self, proposals: Sequence[tuple[str, int]], *, known: bool = True) -> list[int]:
        """How many drafts of each proposal make most tokens per time. known: whether the tokens before the drafts are
        known; otherwise the first draft stands for one that is not."""
        if not proposals:
            return []
        lengths = np.array([length for _, length in proposals])
        acceptances = np.array([self.acceptance(request) for request, _ in proposals])
        gains = acceptances[:, None] ** (self._powers + (not known))
        gains[self._powers > lengths[:, None]] = 0.0
        places = np.argsort(-gains, axis=None, kind="stable")[: int(np.count_nonzero(gains))]
        times = self._costs.table(self._rows + len(places))[self._rows + 1 : self._rows + 1 + len(places)]
        rates = (self._tokens + gains.ravel()[places].cumsum()) / (times + self._gap)
        best = int(rates.argmax()) + 1 if len(rates) else 0
        if best and rates[best - 1] < _MIN_GAIN * self._tokens / self._time:
            best = 0
        counts: list[int] = np.bincount(places[:best] // self._max_drafts, minlength=len(proposals)).tolist()
        return counts

    def _time_of(self, rows: int) -> float:
        return float(self._costs.table(rows)[rows])

    def _pause_asking(self, proposals: Sequence[tuple[str, int]]) -> None:
        """Ask no request for some steps, after proposals of which none was chosen."""
        if any(length for _, length in proposals):
            self._pause = self._pause_left = min(2 * self._pause + 1, _MAX_PAUSE)

    def acceptance(self, request_id: str) -> float:
        """The estimated probability that a draft of a request is accepted if those before it are."""
        common = self._common.accepted / self._common.count
        trials = self._requests.get(request_id)
        if trials is None:
            return min(common, _MAX_ACCEPTANCE)
        estimate = (trials.accepted + _PRIOR_TRIALS * common) / (trials.count + _PRIOR_TRIALS)
        return min(estimate, _MAX_ACCEPTANCE)

    def observe(self, rows: int, time: float, *, drafts: bool) -> None:
        """Correct the measured times by the time of a step. drafts: whether the step had any."""
        if drafts and self._probes:
            self._saved += self._time_of(rows) - time  # what the probes took less, or more, than was counted
        (self._costs if drafts else self._plain).observe(rows, time)

    def observe_gap(self, time: float, sequences: int) -> None:
        """Learn for how long the device was idle before a step with drafts of so many sequences, with drafts or not."""
        self._gaps.setdefault(sequences.bit_length(), _Gap()).add(time)

    def gap(self, sequences: int) -> float:
        """Time for which the device is idle before a step with drafts, in the unit of `costs`: of this number of
        sequences or the nearest one that there was; 0 before the first."""
        if not self._gaps:
            return 0.0
        wanted = sequences.bit_length()
        return self._gaps[min(self._gaps, key=lambda magnitude: abs(magnitude - wanted))].time

    def record(self, request_id: str, verified: int, accepted: int) -> None:
        """Count the drafts of a request. accepted: of those verified."""
        trials = self._requests.setdefault(request_id, _Trials())
        trials.add(verified, accepted, _MEMORY)
        self._common.add(verified, accepted, _COMMON_MEMORY)
        if accepted:
            if request_id in self._probes:
                self._saved += self._time / max(self._tokens, 1)  # what the token would have taken otherwise
            trials.interval = _PROBE_INTERVAL
            trials.next_probe = self._step + 1

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._probes.discard(request_id)

    def _may_probe(self, request_id: str) -> bool:
        """Whether a request whose drafts do not pay may be probed in this step."""
        return self._saved >= self._probe_time and self._is_due(request_id)

    def _is_due(self, request_id: str) -> bool:
        """Whether the last probe of a request is long enough ago."""
        trials = self._requests.get(request_id)
        return trials is None or self._step >= trials.next_probe

    def _probe(self, request_id: str) -> None:
        trials = self._requests.setdefault(request_id, _Trials())
        self._probes.add(request_id)
        trials.next_probe = self._step + trials.interval
        trials.interval = min(2 * trials.interval, _MAX_PROBE_INTERVAL)
