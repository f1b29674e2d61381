"""Proposes what most often followed the last tokens in a tenant's recent requests, or earlier in the same one.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): suffixes of the output so far are looked up among earlier
outputs, and the more often a continuation followed, the more of it is proposed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

from engine.core.speculators import SpeculatedSequence, Speculator, SpeculatorSpec
from engine.plugins.speculators.continuations import Continuations
from engine.plugins.speculators.ngram_index import NgramIndex

_LONG, _SHORT = 8, 2
"""Numbers of last tokens that are looked up among recent requests."""
_OWN_SIZES = (4, 2)
"""The same, within the request itself."""


@frozen(kw_only=True)
class SuffixOptions:
    """Options of suffix, [speculator.options]."""

    tokens: int = field(default=131072)
    """Maximum tokens of recent outputs that are kept per tenant. At most 60 bytes of memory per token."""
    tenants: int = field(default=64)
    """Maximum tenants whose outputs are kept; for a further one, the tenant that was idle longest is forgotten."""
    context: int = field(default=32768)
    """Minimum number of last tokens of a sequence that are indexed. Memory: at most 72 bytes per token if this is a
    power of two, else up to 136."""
    min_confidence: float = field(default=0.3)
    """Minimum share of the occurrences that a token must have followed; 0: propose whatever followed."""

    @tokens.validator
    @context.validator
    def _check_tokens(self, attribute: Any, value: int) -> None:
        if not 1024 <= value <= 2**24:
            raise ValueError(f"{attribute.name} is {value}; give a number from 1024 to {2**24}")

    @tenants.validator
    def _check_tenants(self, _: Any, value: int) -> None:
        if not 1 <= value <= 65536:
            raise ValueError(f"tenants is {value}; give a number from 1 to 65536")

    @min_confidence.validator
    def _check_confidence(self, _: Any, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"min_confidence is {value}; give a number from 0 to 1")


@define(eq=False)
class _Request:
    index: NgramIndex
    tenant: str | None
    prompt_length: int


class Suffix(Speculator[SuffixOptions]):
    """Keeps an index of each sequence, and one of recent outputs per tenant: nothing passes from tenant to tenant."""

    api = "1"
    options_class = SuffixOptions

    def __init__(self, spec: SpeculatorSpec, options: SuffixOptions) -> None:
        super().__init__(spec, options)
        self._requests: dict[str, _Request] = {}
        self._tenants: OrderedDict[str | None, Continuations] = OrderedDict()

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        request = self._requests.get(sequence.request_id)
        if request is None:
            index = NgramIndex(_OWN_SIZES, context=self.options.context)
            request = _Request(index, sequence.tenant, sequence.prompt_length)
            self._requests[sequence.request_id] = request
        index, recent = request.index, self._tenants.get(request.tenant)
        index.extend(sequence.tokens)
        own = index.continuation(limit)
        if recent is None or index.agreement >= _LONG:
            return own
        least = self.options.min_confidence
        return (
            recent.continuation(index.last(_LONG), limit, least)
            or own
            or recent.continuation(index.last(_SHORT), limit, least)
        )

    def finished(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        output = request.index.tokens_from(request.prompt_length)
        if not output:
            return
        recent = self._tenants.get(request.tenant)
        if recent is None:
            recent = self._tenants[request.tenant] = Continuations((_LONG, _SHORT), self.options.tokens)
            if len(self._tenants) > self.options.tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(request.tenant)
        recent.add(output)
