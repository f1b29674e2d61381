"""Request: one prompt to generate from."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any

from attrs import field, frozen

from engine.core.errors import InvalidRequestError
from engine.core.tokens import Tokens
from engine.core.types.sampling_params import SamplingParams
from engine.core.unicode import is_unicode


def _of_type(kind: type, what: str) -> Any:
    """An attrs validator: an instance of `kind`, called `what` in the refusal."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequestError(f"{attribute.name} must be {what}, not {shortened(value)}", attribute.name)

    return check


def _packed(name: str, value: Any) -> Any:
    """Convert a list or tuple of token ids to Tokens; leave other values to the validator.

    Raises InvalidRequestError for an element that is no token id.
    """
    if not isinstance(value, (list, tuple)):
        return value
    try:
        return Tokens(value)
    except TypeError:
        wrong = next(each for each in value if not isinstance(each, int))
        raise InvalidRequestError(f"{name} must hold token ids, not {shortened(wrong)}", name) from None
    except OverflowError:
        wrong = max(value, key=abs)
        raise InvalidRequestError(f"the {name} holds {wrong}, which is no token id", name) from None


def _prompt(value: Any) -> Any:
    return _packed("prompt", value)


def _prediction(value: Any) -> Any:
    return _packed("prediction", value)


_string = _of_type(str, "a string")


def _text(_: Any, attribute: Any, value: Any) -> None:
    """An attrs validator: a string that is Unicode."""
    _string(_, attribute, value)
    if not is_unicode(value):
        raise InvalidRequestError(
            f"the {attribute.name} has half of a surrogate pair, so it is not Unicode", attribute.name
        )


@frozen(kw_only=True)
class Request:
    """One prompt to generate from.

    Raises InvalidRequestError, with `parameter` set, for a value of a wrong type.
    """

    id: str = field(validator=_text)
    prompt: Tokens = field(converter=_prompt, validator=_of_type(Tokens, "a tuple of token ids"))
    """A tuple or list is converted."""
    params: SamplingParams = field(default=SamplingParams(), validator=_of_type(SamplingParams, "SamplingParams(...)"))
    priority: int = field(default=0, validator=_of_type(int, "a whole number"))
    """Lower is more urgent, for policies that have priorities."""
    arrival: float = 0.0
    """time.monotonic() at arrival, seconds."""
    salt: str = field(default="", validator=_text)
    """Requests share prefix cache entries only if their salts are equal."""
    cache_key: str = field(default="", validator=_text)
    """Requests with the same key likely share a prefix, so a server sends them to the same replica. Empty: no key."""
    prediction: Tokens = field(
        default=Tokens(), converter=_prediction, validator=_of_type(Tokens, "a tuple of token ids")
    )
    """The output that the client expects; a tuple or list is converted. Where the output agrees with it, the next
    tokens of it are proposed as drafts, in addition to the speculator's. Changes no token. Empty: no prediction."""
