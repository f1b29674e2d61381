"""Says in one sentence why the hub did not give what was asked for, and what to do."""

from __future__ import annotations

import errno

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TOO_MANY_REQUESTS = 429


def hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: HTTP errors of its client, which is httpx or its successor, and OSError."""
    from huggingface_hub import errors

    http: type[Exception] = vars(errors)["HTTPError"]
    return http, OSError, errors.HFValidationError


def is_offline(error: Exception) -> bool:
    """Whether the user has forbidden to ask the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def is_answer(error: Exception) -> bool:
    """Whether the hub has refused the request, so that sending it again is useless."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500 and error.response.status_code != _TOO_MANY_REQUESTS
    return isinstance(error, HFValidationError)


def is_transient(error: Exception) -> bool:
    """Whether a request may succeed when it is sent again: a lost connection, or a server that is overloaded."""
    return isinstance(error, (hub_errors()[0], ConnectionError)) and not (is_answer(error) or is_offline(error))


def explain(error: Exception, model: str, revision: str) -> str:
    """Why a request to the hub failed, and what to do."""
    from huggingface_hub import constants, errors, get_token

    hub, cause = constants.ENDPOINT, error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, hub_errors()):
        error = cause  # huggingface_hub looks into the cache before it gives up, and says so instead of the cause
    if isinstance(error, errors.GatedRepoError):
        then = "your account has no access yet" if get_token() else "log in: `hf auth login`, or HF_TOKEN"
        return f"{model} is gated; accept its terms at {hub}/{model} ({then})"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}; give a branch, tag or commit of {hub}/{model}/tree/main"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not get_token()):
        may = "that your token may read" if get_token() else "that is public"
        log_in = "" if get_token() else ", or log in for a private one (`hf auth login`, or HF_TOKEN)"
        return (
            f"{model} is neither a directory here nor, on {hub}, the name of a model {may}; check the spelling{log_in}"
        )
    if status == 401:
        return f"{hub} does not accept your token; log in again (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.HfHubHTTPError):
        return f"{hub} answers {status} ({error.server_message or error.response.reason_phrase}); try again later"
    if isinstance(error, errors.HFValidationError):
        return f"{model} is neither a directory here nor a possible name of a model on {hub}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be written ({error.strerror}); name another folder with --download-dir"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"the disk is full ({error.strerror}); make room, or name another folder with --download-dir"
    return f"{hub} cannot be reached ({type(error).__name__}: {error})"
