"""Says why no token could be sampled for a request."""

from __future__ import annotations

from engine.core.schedulers.request_state import RequestState


def no_token_error(state: RequestState, *, grammar_owner: str, not_built_in: str) -> str:
    """Why no token could be sampled after the latest one of a request, a sentence.

    grammar_owner: the plugin that compiles grammars, as errors name it. not_built_in: Parts.not_built_in.
    """
    if state.params.grammar is not None:
        return (
            f"request {state.id}: no token may follow after {len(state.output)} tokens of output: {grammar_owner}"
            f" cannot go on (the log says why) or allows no token, or the logits are not finite{not_built_in}"
        )
    return (
        f"request {state.id}: the logits after {len(state.tokens)} tokens are not finite (NaN or infinite), so no token"
        " can be sampled; the weights may be damaged, or the numbers outgrow this dtype: try bfloat16 or"
        f" float32{not_built_in}"
    )
