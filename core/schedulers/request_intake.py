"""Checks new requests against what the scheduler can serve, and makes their state."""

from __future__ import annotations

import secrets

import attrs

from engine.core.errors import InvalidRequestError
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.speculators.prediction_check import check_prediction
from engine.core.types import MAX_SEED, Request


class RequestIntake:
    """Makes the state of each new request: with its maximum length, its seed and its stop tokens."""

    def __init__(
        self,
        blocks: BlockManager,
        counter: StepCounter,
        *,
        max_len: int,
        eos_tokens: frozenset[int],
        speculates: bool,
    ) -> None:
        """max_len: maximum context, prompt and output together. eos_tokens: the model's end-of-sequence tokens.
        speculates: whether steps may have drafts."""
        self._blocks = blocks
        self._counter = counter
        self._max_len = max_len
        self._eos_tokens = eos_tokens
        self._speculates = speculates
        self._requests_made = 0

    def make_state(self, request: Request) -> RequestState:
        """Make the state of a request. Raises InvalidRequestError if the request can never run."""
        limit = _max_output(request, max_len=self._max_len, cache_tokens=self._blocks.max_tokens)
        params = request.params
        if request.prediction:
            check_prediction(speculates=self._speculates)
            if len(request.prediction) > self._max_len:
                raise InvalidRequestError(
                    f"a prediction of {len(request.prediction)} tokens exceeds {self._max_len} tokens, the longest "
                    "context; shorten it",
                    "prediction",
                )
        if params.seed is None:
            params = attrs.evolve(params, seed=secrets.randbelow(MAX_SEED))
        stop_tokens = self._eos_tokens if not params.ignore_eos else frozenset()
        if params.stop_token_ids:
            stop_tokens = stop_tokens.union(params.stop_token_ids)
        self._requests_made += 1
        return RequestState(
            request,
            params,
            max_output=limit,
            stop_tokens=stop_tokens,
            block_size=self._blocks.block_size,
            chain=self._blocks.chain(request.salt),
            number=self._requests_made,
            counter=self._counter,
        )


def _max_output(request: Request, *, max_len: int, cache_tokens: int) -> int:
    """Maximum tokens a request may generate, given the maximum context and the tokens that fit into the KV cache.

    Raises InvalidRequestError when the request can never run.
    """
    prompt, max_tokens, min_tokens = len(request.prompt), request.params.max_tokens, request.params.min_tokens
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    # The last token sampled is never computed, so it needs no place in the cache.
    longest = min(max_len, cache_tokens + 1)
    possible = longest - prompt
    limit = f"{longest} tokens, " + ("the longest context" if longest == max_len else "all that the KV cache can hold")
    if possible < 1:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens leaves no room for output within {limit}; shorten it", "prompt"
        )
    asked, name = (min_tokens, "min_tokens") if max_tokens is None else (max_tokens, "max_tokens")
    if asked > possible:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens and {name} of {asked} exceed {limit}; use a {name} of at most {possible}",
            name,
        )
    return max_tokens or possible
