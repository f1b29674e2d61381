"""Chooses how many drafts of each sequence a step verifies: the number with the most tokens per time, or none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import define

from engine.core.speculators.gaps import Gaps
from engine.core.speculators.probes import Probes
from engine.core.speculators.step_costs import StepCosts

_MEMORY = 0.95
"""Weight of a trial relative to the next one in the acceptance of a request: about the last 20 trials count."""
_COMMON_MEMORY = 0.98
"""The same in the common acceptance, of all requests together, with which a new request begins."""
_PRIOR_TRIALS = 8.0
"""Number of trials as which the common acceptance counts in the acceptance of one request."""
_FIRST_ACCEPTANCE, _FIRST_TRIALS = 0.5, 8.0
"""The common acceptance before the first trial, and the number of trials as which it counts."""
_MAX_ACCEPTANCE = 0.99
_MIN_GAIN = 1.02
"""Minimum tokens per time with drafts, relative to those without, that count as a gain: estimates are not exact."""
_MAX_PAUSE = 16
"""Maximum steps for which no request is asked after proposals that did not pay."""
_LONGEST_PROBE = 2.0
"""Time of a step with probes, relative to the expected one, beyond which it counts no further: a probe never takes so
long, but the first use of a kernel may."""
_PROBED_AT_ONCE = 1.02
"""Maximum time of a step that probes several requests, relative to one that probes one: they share the host's wait,
which is most of a probe's cost."""


@define
class _Trials:
    """Verified drafts: a trial per draft, up to and including the first of a proposal that was rejected. Weighted sums:
    recent trials count more."""

    accepted: float = 0.0
    count: float = 0.0


_NO_TRIALS = _Trials()


class DraftLengths:
    """Chooses draft lengths by the measured acceptance of each request and the measured times of steps.

    Where drafts are accepted with probability a if those before them are, draft number j adds a token with probability
    a^j.
    A step verifies the most probable drafts of all its sequences, as many as maximize

        (tokens without drafts + the sum of their probabilities) / the time of a step of that many rows.

    Per step: `begin`, then `limits` of the requests that may have drafts, then `choose` if there are proposals; later
    `probed`, and `record` of the drafts that were verified. `observe` may be called at any time, `prepare` after
    `choose`.

    A request whose drafts do not pay is probed from time to time, with one draft; the probes that fail take at most
    0.5 % of the time, those of all requests together.

    Where steps overlap, the host has to wait for the step in flight before it plans one with drafts, and for that one
    before it plans the next: the device is idle meanwhile, for the time that `gaps` learns. `pays` is called between
    `limits` and `choose` then: it says whether to wait at all.
    """

    def __init__(
        self, costs: StepCosts, max_drafts: int, *, plain: StepCosts | None = None, overlaps: bool = False
    ) -> None:
        """costs: times of steps with drafts; plain: of those without, None: the same; overlaps: whether steps without
        drafts are planned while the step before them runs."""
        self.gaps = Gaps()
        """Of steps with drafts, where steps overlap."""
        self._overlaps = overlaps
        self._costs = costs
        self._plain = plain or costs
        self._max_drafts = max_drafts
        self._requests: dict[str, _Trials] = {}
        self._common = _Trials(accepted=_FIRST_ACCEPTANCE * _FIRST_TRIALS, count=_FIRST_TRIALS)
        self._powers = np.arange(1, max_drafts + 1)
        self._probes = Probes()
        self._rows = self._tokens = 0
        self._time = 0.0
        """Time of this step without drafts."""
        self._gap = 0.0
        """Time for which the device is idle before this step if the step has drafts."""
        self._least = 1.0
        """Probability below which no draft can pay in this step."""
        self._needed: list[float] = []
        """For draft numbers 1, 2, ...: acceptance below which it cannot pay, since its probability is too small."""
        self._waiting_time = 0.0
        """Time by which this step, without drafts, takes longer if it does not overlap with the step before."""
        self._pause = self._pause_left = 0
        """Steps for which no request is asked after proposals that did not pay, and how many of them are left."""
        self._waited = False
        """Whether the host waits for drafts of this step, and none are chosen so far."""
        self._cost = 0.0
        """Time that a probe adds to this step and the next one."""
        self._chosen_from: Sequence[tuple[str, int]] = ()
        """The proposals from which drafts of this step were chosen; none: no drafts were."""
        self._prepared: tuple[Sequence[tuple[str, int]], list[int]] | None = None
        """The proposals that this step is expected to have, and the choice; None: nothing is prepared."""
        self._counted = False
        """Whether the times of the next step are estimated, if it has the rows of this one."""

    def begin(self, rows: int, tokens: int) -> bool:
        """Begin a step; False: no draft can pay in this step, so `limits` need not be called.

        rows: rows without drafts; tokens: how many of them yield a token.
        """
        if self._waited:  # in vain
            self._probes.spend(self._waiting_time)
            self._waited = False
        if not self._counted or (rows, tokens) != (self._rows, self._tokens):
            self._prepared = None
            self._count(rows, tokens)
        self._counted = False
        self._probes.begin(self._time, self._cost)
        if self._pause_left:
            self._pause_left -= 1
            return False
        return tokens > 0 and (self._least <= _MAX_ACCEPTANCE or self._probes.affordable)

    def revise(self, rows: int, tokens: int) -> None:
        """Correct the rows and tokens of the step that has begun."""
        self._prepared = None
        self._count(rows, tokens)
        self._probes.revise(self._cost)

    def _count(self, rows: int, tokens: int) -> None:
        """Estimate the times of a step, and what a probe adds to it and to the next one, which does not overlap."""
        self._rows, self._tokens = rows, tokens
        most = max(tokens, 1) * self._max_drafts
        self._time = float(self._plain.table(rows)[rows])
        self._gap = self.gaps.expected(tokens)
        times = self._costs.table(rows + most)[rows : rows + 1 + most] + self._gap
        # The least time per row that any number of further rows has.
        further = times[1:] - self._time
        self._least = float((further / np.arange(1, most + 1)).min()) * tokens / self._time
        least = max(self._least, 0.0)
        self._needed = [least ** (1 / number) - 1e-9 for number in range(1, self._max_drafts + 1)]
        self._waiting_time = max(float(times[0]) - self._time, 0.0) if self._overlaps else 0.0
        self._cost = max(float(further[0]), 0.0) + self._waiting_time

    def limits(self, requests: Sequence[str]) -> list[int]:
        """Maximum drafts of each request that may pay in this step; 0: none, so no proposal is needed."""
        return [
            bisect_right(self._needed, acceptance) or int(self._probes.may(request))
            for request, acceptance in zip(requests, self.acceptances(requests), strict=True)
        ]

    def pays(self, proposals: Sequence[tuple[str, int]]) -> bool:
        """Whether to wait for the step in flight, so that the step that has begun may have drafts.

        proposals: (request, number of drafts), by the tokens before the step in flight: the first draft of each is for
        a token that is sampled already.
        """
        if self._probes.indebted:  # waited too often in vain
            return False
        proposals = [(request, length) for request, length in proposals if length]
        probes = any(self._probes.may(request) for request, _ in proposals)
        self._waited = probes or any(self._most_per_time(proposals, known=False))
        if not self._waited:
            self._pause_asking(proposals)
        return self._waited

    def choose(self, proposals: Sequence[tuple[str, int]]) -> list[int]:
        """How many drafts of each proposal to verify. proposals: (request, number of drafts)."""
        self._probes.clear()
        if self._prepared is not None and self._prepared[0] == proposals:
            found = self._prepared[1]
        else:
            found = self._most_per_time(proposals)
        self._prepared = None
        self._chosen_from = proposals if any(found) else ()
        if any(found):
            self._pause = 0
        rows = self._rows + sum(found)
        limit: float | None = None
        for place, (request, length) in enumerate(proposals):
            if not length or found[place]:
                continue
            if limit is None and self._probes.may(request):
                limit = _PROBED_AT_ONCE * self._time_of(rows + 1)
                self._probes.pay()
            if limit is not None and self._probes.is_due(request) and self._time_of(rows + 1) <= limit:
                self._probes.start(request)
                found[place] = 1
                rows += 1
        if any(found):
            self._waited = False
        else:
            self._pause_asking(proposals)
        return found

    def prepare(self) -> None:
        """Choose the next step's drafts in advance, as if it had the rows and proposals of this one: if it has, `begin`
        and `choose` are quick. To be called while the device works, like `observe`; what is recorded later counts from
        the step after the next."""
        if self._chosen_from:
            self._count(self._rows, self._tokens)
            self._prepared = self._chosen_from, self._most_per_time(self._chosen_from)
            self._counted = True

    def _most_per_time(self, proposals: Sequence[tuple[str, int]], *, known: bool = True) -> list[int]:
        """How many drafts of each proposal make the most tokens per time. known: whether the tokens before the drafts
        are known; otherwise one more token before them must be predicted."""
        if not proposals:
            return []
        lengths = np.array([length for _, length in proposals])
        acceptances = np.array(self.acceptances([request for request, _ in proposals]))
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

    def acceptances(self, requests: Iterable[str]) -> list[float]:
        """The estimated probability of each request that a draft of it is accepted if those before it are."""
        prior = _PRIOR_TRIALS * self._common.accepted / self._common.count
        estimates: list[float] = []
        for request in requests:
            trials = self._requests.get(request, _NO_TRIALS)
            estimate = (trials.accepted + prior) / (trials.count + _PRIOR_TRIALS)
            estimates.append(estimate if estimate < _MAX_ACCEPTANCE else _MAX_ACCEPTANCE)
        return estimates

    def probed(self, rows: int, time: float) -> None:
        """If the step has probes, charge the time by which it exceeds the expected time, or credit what it saves."""
        if self._probes.running:
            expected = self._time_of(rows)
            self._probes.spend(min(time, _LONGEST_PROBE * expected) - expected)

    def observe(self, rows: int, time: float, *, drafts: bool) -> None:
        """Correct the measured times by the time of a step. drafts: whether the step had any."""
        (self._costs if drafts else self._plain).observe(rows, time)

    def record(self, outcomes: Sequence[tuple[str, int, int]]) -> None:
        """Count drafts. outcomes: (request, drafts verified, drafts accepted of these)."""
        common_accepted, common_count = self._common.accepted, self._common.count
        for request, verified, accepted in outcomes:
            count = accepted + (accepted < verified)
            trials = self._requests.get(request)
            if trials is None:
                trials = self._requests[request] = _Trials()
            kept = _MEMORY**count
            trials.accepted = trials.accepted * kept + accepted
            trials.count = trials.count * kept + count
            kept = _COMMON_MEMORY**count
            common_accepted = common_accepted * kept + accepted
            common_count = common_count * kept + count
        self._common.accepted, self._common.count = common_accepted, common_count
        accepted_of = (request for request, _, accepted in outcomes if accepted)
        self._probes.accepted(accepted_of, self._time / max(self._tokens, 1))

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._probes.finished(request_id)
